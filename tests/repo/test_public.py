"""`__all__` is what is there: nothing public is forgotten in it and nothing in it is missing."""

import ast

import pytest
from source_tree import CLIENT, SERVICE, module_name, python_files, tree

import qlinear_client

FILES = {
    module_name(path, root.parent): path
    for root in (SERVICE, CLIENT)
    for path in python_files(root)
    if path.name != "__main__.py"
}


def declared(module: ast.Module) -> list[str] | None:
    """The names in `__all__`; None if the file has none."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def bound(module: ast.Module) -> set[str]:
    """Every name that the top of a file defines, assigns or imports."""
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return names


def public(module: ast.Module) -> set[str]:
    """The functions and classes of a file without a leading underscore."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = {node.name for node in module.body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", FILES)
def test_all_lists_what_is_there(name: str) -> None:
    module = tree(FILES[name])
    listed = declared(module)
    if listed is None:
        assert len(module.body) == 1, f"{name} has no __all__ and is more than a docstring"
        return
    assert set(listed) <= bound(module), "listed but not there"
    assert public(module) <= set(listed), "public but not listed"
    assert len(set(listed)) == len(listed)


def test_the_client_exports_what_it_imports() -> None:
    module = tree(CLIENT / "__init__.py")
    assert bound(module) - {"__all__"} == set(declared(module) or ())


def test_exports_resolve() -> None:
    for name in qlinear_client.__all__:
        assert getattr(qlinear_client, name) is not None
