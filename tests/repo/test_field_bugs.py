"""The table of public bugs names tests that exist, and leaves out no report."""

import ast
import re

import pytest
from source_tree import ROOT, tree

TABLE = ROOT / "docs/field-bugs.md"
REPORTS = 64
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
REASONS = ("does not apply yet: ", "by design: ")


def rows() -> list[list[str]]:
    """The cells of each report's row: number, threads, symptom, guard."""
    lines = TABLE.read_text().splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in row] for row in found]


def names_of(path: str) -> set[str]:
    """The test functions of a file."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree(ROOT / path)) if isinstance(node, functions)}


def test_every_report_has_one_row() -> None:
    assert [row[0] for row in rows()] == [str(number) for number in range(1, REPORTS + 1)]
    assert {len(row) for row in rows()} == {4}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_row_is_guarded_or_says_why_not(row: list[str]) -> None:
    tests = TEST.findall(row[3])
    assert tests or row[3].startswith(REASONS)
    # Not one that is written otherwise, and so is not looked for.
    assert row[3].count("::") == len(tests)
    for path, name in tests:
        assert (ROOT / path).is_file(), path
        assert name.startswith("test_"), name
        assert name in names_of(path), f"{path} has no {name}"
