"""The locks of the images (deploy/requirements) as the tests read them."""

import re

from source_tree import ROOT

REQUIREMENTS = ROOT / "deploy/requirements"


def text(name: str) -> str:
    """Return a lock as it lies there."""
    return (REQUIREMENTS / f"{name}.txt").read_text()


def normal(name: str) -> str:
    """Return a package's name as indices write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, str]:
    """Return the versions of a lock by package."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text(name), re.MULTILINE)
    return {normal(package): version for package, version in found}
