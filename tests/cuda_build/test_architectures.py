"""What is compiled for, with which nvcc, and what the driver says is there."""

from pathlib import Path

import pytest
from cuda_tools import fake_nvcc, without_nvcc

from qlinear_service.errors import BuildError
from qlinear_service.kernels import driver, nvcc
from qlinear_service.kernels.architectures import (
    ARCHITECTURES,
    architecture_of,
    chosen_architectures,
)
from qlinear_service.kernels.ninja import ToolMissing


def test_nvcc_is_looked_for_in_all_places_and_old_ones_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    without_nvcc(monkeypatch, tools)
    fake_nvcc(tools / "nvcc", "12.7")
    with pytest.raises(ToolMissing, match=r"no nvcc of CUDA 12\.8 or newer \(\S+/nvcc is 12\.7\)"):
        nvcc.find_nvcc()
    places = [tools / "nvidia/cu13/bin/nvcc", tools / "usual/bin/nvcc", tools / "home/bin/nvcc"]
    monkeypatch.setattr(nvcc, "USUAL_HOME", str(tools / "usual"))
    monkeypatch.setenv("CUDA_HOME", str(tools / "home"))
    for place, release in zip(places, ["13.0", "12.8", "12.9"], strict=True):
        fake_nvcc(place, release)
        assert nvcc.find_nvcc() == (str(place), f"nvcc V{release}.1")
    monkeypatch.setenv("NVCC", str(places[0]))
    assert nvcc.find_nvcc()[0] == str(places[0])
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(ToolMissing, match="NVCC is 'no-such-nvcc', and there is no such program"):
        nvcc.find_nvcc()


def test_architectures_are_named_checked_and_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_architectures(["90", "80", "90a"]) == ("80", "90a")
    assert chosen_architectures(ARCHITECTURES) == ARCHITECTURES
    for names, problem in ((["87"], "'87' is unknown"), ([], "is named"), (["80", ""], "unknown")):
        with pytest.raises(BuildError, match=f"{problem}; expected some of 80, 86, 89, 90a"):
            chosen_architectures(names)


def test_native_means_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(*capabilities: tuple[int, int]) -> driver.Driver:
        found = [
            driver.Gpu(ordinal=i, name=f"GPU {i}", major=major, minor=minor, memory_bytes=1)
            for i, (major, minor) in enumerate(capabilities)
        ]
        return driver.Driver(cuda_version=(13, 0), gpus=tuple(found))

    answers = [gpus((9, 0), (8, 0), (9, 0)), gpus((8, 9), (7, 5)), driver.Driver(problem="none")]
    monkeypatch.setattr("qlinear_service.kernels.architectures.ask_driver", lambda: answers.pop(0))
    assert chosen_architectures(["native"]) == ("80", "90a")
    with pytest.raises(BuildError, match=r"GPU 1 has compute capability 7\.5, for which there are"):
        chosen_architectures(["native"])
    with pytest.raises(BuildError, match="native means nothing here: none"):
        chosen_architectures(["native"])


def test_each_capability_has_its_architecture() -> None:
    assert [architecture_of(*pair) for pair in ((8, 0), (8, 9), (9, 0), (12, 0))] == [
        "80",
        "89",
        "90a",
        "120",
    ]
    assert [architecture_of(*pair) for pair in ((7, 5), (8, 7), (10, 3), (12, 1))] == [None] * 4
