"""The tables of public bugs name tests that exist, and leave out no report."""

import ast
import re
from pathlib import Path

import pytest
from source_tree import ROOT, tree

TABLES = {
    "docs/field-bugs.md": [str(number) for number in range(1, 65)],
    "docs/field-bugs-formats.md": [str(number) for number in range(1, 56)],
    "docs/field-bugs-kernel.md": [
        *(str(number) for number in range(1, 47)), "46a", "46b",
        *(str(number) for number in range(47, 82)),
    ],
}  # fmt: skip
"""Each table with its reports, in their order."""

TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
REASONS = ("does not apply yet: ", "by design: ", "measured: ")


def rows(table: str) -> list[list[str]]:
    """The cells of each report's row: number, threads, symptom, guard."""
    lines = (ROOT / table).read_text().splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in row] for row in found]


def names_of(path: str) -> set[str]:
    """The test functions of a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree(ROOT / path)) if isinstance(node, functions)}


@pytest.mark.parametrize("table", TABLES)
def test_every_report_has_one_row(table: str) -> None:
    assert [row[0] for row in rows(table)] == TABLES[table]
    assert {len(row) for row in rows(table)} == {4}
    assert all(cell for row in rows(table) for cell in row)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{Path(table).stem}-{row[0]}")
        for table in TABLES
        for row in rows(table)
    ],
)
def test_every_row_is_guarded_or_says_why_not(row: list[str]) -> None:
    tests = TEST.findall(row[3])
    assert tests or row[3].startswith(REASONS)
    # Not one that is written otherwise, and so is not looked for.
    assert row[3].count("::") == len(tests)
    for path, name in tests:
        assert (ROOT / path).is_file(), path
        assert name.startswith("test_"), name
        assert name in names_of(path), f"{path} has no {name}"
