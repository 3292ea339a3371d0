"""Reads the project's own Python files for the tests in tests/repo: paths, trees, imports."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVICE = ROOT / "service/qlinear_service"
CLIENT = ROOT / "client/qlinear_client"


def python_files(*folders: Path) -> list[Path]:
    """Every Python file under the folders, sorted."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path, root: Path) -> str:
    """The import name of a file under a source root, e.g. "qlinear_service.kernels.layout"."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports at run time, at its top or inside functions.

    `from a import b` counts as "a" and "a.b": b may be a module or a name.
    """
    names: set[str] = set()
    for node in _run_time_nodes(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without the blocks that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_time_nodes(child)
