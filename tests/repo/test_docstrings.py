"""Every file says what it is for, and none grows beyond what one can read."""

import ast
from pathlib import Path

import pytest
from source_tree import CLIENT, ROOT, SERVICE, python_files, tree

FILE_LINES = 300
FILE_LINES_WITH_REASON = 500
FUNCTION_LINES = 60

# Files between the two budgets, each with its reason. This list must shrink.
LONG_FILES: dict[str, str] = {}

FILES = python_files(
    SERVICE, CLIENT, *(ROOT / name for name in ("tests", "benchmarks", "examples"))
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_module_says_what_it_is_for(path: Path) -> None:
    text = ast.get_docstring(tree(path))
    assert text, f"{relative(path)} has no module docstring"
    assert text.splitlines()[0].strip(), "the first line is empty"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_lengths_stay_within_budget(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    budget = FILE_LINES_WITH_REASON if relative(path) in LONG_FILES else FILE_LINES
    assert lines <= budget, f"{relative(path)} has {lines} lines; the budget is {budget}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name}: {length}"


def test_the_list_of_long_files_is_not_stale() -> None:
    for name in LONG_FILES:
        assert len((ROOT / name).read_text().splitlines()) > FILE_LINES, name
