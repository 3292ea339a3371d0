"""What the images install is locked, fits the project, and is listed with its licences."""

import re
import subprocess
import sys
from importlib.metadata import distribution, requires

import pytest
from image_locks import REQUIREMENTS, normal, pins, text
from packaging.requirements import Requirement
from source_tree import ROOT

LOCKS = ("cpu", "cpu-torch", "gpu", "build", "sbom")
OF_CUDA = re.compile(r"torch|triton|(nvidia|cuda)-.*")


def constrained() -> dict[str, str]:
    """The versions of constraints.txt."""
    found = re.findall(r"^([^#\s]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {normal(name): version for name, version in found}


def needed(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """What an installed package needs here, and what that needs; without what is only CUDA's."""
    found: set[str] = set()
    for line in requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        other = normal(requirement.name)
        if other == "nvidia-ml-py" or not OF_CUDA.fullmatch(other) or other == "torch":
            found |= {other} | needed(other, tuple(requirement.extras))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_is_one_version_with_hashes_and_names_no_index(name: str) -> None:
    lines = [line for line in text(name).splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines)).splitlines()
    assert joined
    for line in joined:
        assert re.fullmatch(r"[\w.-]+==[\w.!+]+( ; [^-]+)?( +--hash=sha256:[0-9a-f]{64})+", line), (
            line
        )
    assert "://" not in text(name)


def test_the_locks_have_the_versions_that_are_tested() -> None:
    wanted = constrained()
    for name in ("cpu", "build", "sbom"):
        differs = {key: pin for key, pin in pins(name).items() if wanted.get(key, pin) != pin}
        assert not differs, f"{name}.txt: make lock"
    assert pins("cpu-torch") == {"torch": f"{wanted['torch']}+cpu"}
    own = {name: pin for name, pin in pins("gpu").items() if name in pins("cpu")}
    assert own == pins("cpu"), "gpu.txt: make lock"


def test_the_locks_have_all_that_a_server_needs_and_nothing_else() -> None:
    need = needed("qlinear", ("server", "tracing"))
    assert len(need) > 20
    assert pins("cpu").keys() | {"torch"} == need
    assert {name for name in pins("gpu").keys() - need if not OF_CUDA.fullmatch(name)} == set()
    assert need <= pins("gpu").keys()


def test_every_package_is_listed_with_its_licence() -> None:
    rows = re.findall(
        r"^\| ([\w-]+) \| (\S*) \| (\S*) \| (.*) \|$",
        (REQUIREMENTS / "licences.md").read_text(),
        re.MULTILINE,
    )
    listed = {name: (cpu, gpu, licence) for name, cpu, gpu, licence in rows if name != "package"}
    cpu, gpu = pins("cpu") | pins("cpu-torch"), pins("gpu")
    assert listed.keys() == cpu.keys() | gpu.keys()
    for name, (on_cpu, on_gpu, licence) in listed.items():
        assert (on_cpu, on_gpu) == (cpu.get(name, ""), gpu.get(name, "")), f"{name}: make lock"
        assert len(licence) > 2, name


def test_listed_licences_are_those_of_the_packages() -> None:
    listed = (REQUIREMENTS / "licences.md").read_text()
    checked = 0
    for name in pins("cpu"):
        said = distribution(name).metadata["License-Expression"]
        if said:
            assert re.search(rf"^\| {re.escape(name)} .*\| {re.escape(said)} \|$", listed, re.M)
            checked += 1
    assert checked > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_locks_are_what_would_be_locked_today() -> None:
    """Asks the package index: hashes that it does not know are refused, too."""
    pytest.importorskip("uv", reason="uv is missing: make lint installs it")
    words = [sys.executable, "deploy/requirements/lock.py", "--check"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
