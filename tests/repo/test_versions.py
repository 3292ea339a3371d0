"""Each version is written in one place; everything else asks for it."""

import re
import subprocess
import sys
import tomllib

from source_tree import CLIENT, ROOT, SERVICE, python_files

import qlinear_client
import qlinear_service
from qlinear.v1 import linear_pb2 as pb
from qlinear_service.kernels import layout

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def pins() -> dict[str, str]:
    """The exact versions of constraints.txt by package name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line.partition("#")[0].strip() for line in lines]
    found = dict(entry.split("==") for entry in entries if entry)
    return {name.lower().replace("_", "-"): version for name, version in found.items()}


def test_packages_and_program_report_the_projects_version() -> None:
    assert qlinear_client.__version__ == qlinear_service.__version__ == VERSION
    done = subprocess.run(
        [sys.executable, "-m", "qlinear_service", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"qlinear {VERSION}\n"


def test_no_source_repeats_the_version() -> None:
    literal = re.compile(rf"""["']{re.escape(VERSION)}["']""")
    for path in python_files(SERVICE, CLIENT):
        assert not literal.search(path.read_text()), path


def test_the_changelog_knows_the_version() -> None:
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"].values()
    wanted = [*PROJECT["dependencies"], *(entry for extra in extras for entry in extra)]
    names = {re.split(r"[<>=\[; ]", entry)[0].lower().replace("_", "-") for entry in wanted}
    assert names - pins().keys() == set()


def test_the_grpc_packages_are_pinned_together() -> None:
    grpc = {name: pin for name, pin in pins().items() if name.startswith("grpcio")}
    assert len(grpc) >= 4
    assert set(grpc.values()) == {"1.78.2"}


def test_generated_modules_load_on_the_oldest_versions_that_are_allowed() -> None:
    """Both refuse, at import, a runtime that is older than what has generated them."""
    oldest = {}
    for entry in PROJECT["dependencies"]:
        name, _, bounds = entry.partition(">=")
        oldest[name] = tuple(map(int, bounds.split(",")[0].split(".")))
    folder = ROOT / "proto/qlinear/v1"
    found = re.search(
        r"ValidateProtobufRuntimeVersion\(\s*\S+PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+)",
        (folder / "linear_pb2.py").read_text(),
    )
    assert found is not None
    assert tuple(map(int, found.groups())) <= oldest["protobuf"]
    made = re.search(
        r"GRPC_GENERATED_VERSION = '([\d.]+)'", (folder / "linear_pb2_grpc.py").read_text()
    )
    assert made is not None
    assert tuple(map(int, made[1].split("."))) <= oldest["grpcio"]


def test_the_page_of_upgrades_names_the_versions_of_now() -> None:
    page = (ROOT / "docs/upgrades.md").read_text()
    assert f"layout version {layout.VERSION} (" in page
    assert f"`{pb.DESCRIPTOR.package}`" in page
