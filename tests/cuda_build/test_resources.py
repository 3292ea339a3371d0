"""The table of what kernels take, and that the check of it fails where it must."""

import json
from pathlib import Path

import pytest
from cuda_tools import SMALL, SPILLING, require_nvcc, use_sources

from qlinear_service.errors import BuildError
from qlinear_service.kernels import resources
from qlinear_service.kernels.build_cuda import build_cuda_library

# Words of ptxas 13.0: a kernel with shared memory, one that calls a function with a stack frame.
SAID = """
[1/3] nvcc -Xptxas=-v small.cu
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7qlinear4cuda6linearINS0_4BF16ELi8EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN7qlinear4cuda6linearINS0_4BF16ELi8EEEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 126 registers, used 16 barriers, 1280 bytes smem, 568 bytes cmem[0]
ptxas info    : Compile time = 577.404 ms
ptxas info    : Function properties for _Z7anotherPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z5plainPf' for 'sm_80'
ptxas info    : Function properties for _Z5plainPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes cumulative stack size
ptxas info    : Compile time = 10.415 ms
ptxas info    : Function properties for _Z6calleePfi
    256 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Compile time = 1.966 ms
ptxas info    : Compiling entry function '_Z5plainPf' for 'sm_100'
ptxas info    : Function properties for _Z5plainPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *words: str) -> int:
    require_nvcc()
    use_sources(monkeypatch, tmp_path, text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return resources.main(["--arch", "80,90a", *words])


def test_what_ptxas_says_is_read() -> None:
    linear, plain, plain_100 = resources.parse(SAID)
    assert (linear.kernel, linear.architecture) == ("linear<BF16, 8>", "90a")
    assert (linear.registers, linear.shared_bytes, linear.faulty) == (126, 1280, False)
    assert (plain.kernel, plain.architecture, plain.registers) == ("plain", "80", 40)
    assert (plain.stack_bytes, plain.spill_store_bytes, plain.spill_load_bytes) == (256, 8, 12)
    assert (plain_100.architecture, plain_100.faulty) == ("100", False)
    assert resources.format_table([linear, plain, plain_100]).splitlines() == [
        "kernel                           sm_80    sm_90a  sm_100",
        "linear<BF16, 8>                      -  126+1280       -",
        "plain            40 SPILL 20 STACK 256         -       8",
    ]


@pytest.mark.parametrize("bytes_found", ["8 0 0", "0 8 0", "0 0 8", "0 0 0"])
def test_each_way_through_memory_is_a_fault(bytes_found: str) -> None:
    stack, stores, loads = bytes_found.split()
    found = f"{stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads"
    said = SAID.replace("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", found, 1)
    linear = resources.parse(said)[0]
    assert linear.faulty == (bytes_found != "0 0 0")


def test_words_that_are_not_understood_are_no_clean_bill() -> None:
    with pytest.raises(BuildError, match="does not say how many registers _Z5plainPf uses"):
        resources.parse(SAID.replace("Used 40 registers", "Registers: 40"))


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        ("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async are serialized", True),
        ("ptxas info : (C7508) setmaxnreg ignored to maintain minimum requirements", True),
        ("ptxas warning : Value of threads per SM is out of range", True),
        ("ptxas warning : Registers are spilled to local memory in function 'x'", False),
        ("ptxas info    : Used 8 registers, used 0 barriers", False),
    ],
)
def test_kernels_that_ptxas_made_slow_are_found(line: str, slow: bool) -> None:
    assert resources.slow_kernels(f"before\n{line}\nafter\n") == ([line] if slow else [])


def test_a_clean_library_passes_with_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, SMALL) == 0
    said = capsys.readouterr()
    head, row, last = said.out.splitlines()
    assert head.split() == ["kernel", "sm_80", "sm_90a"]
    assert row.split()[0] == "doubled"
    assert [cell.split("+")[1] for cell in row.split()[1:]] == ["128", "128"]
    assert last.startswith("1 kernels, 2 with architectures, built in ")
    assert said.err == ""


@pytest.mark.parametrize("json_wanted", [False, True])
def test_a_kernel_that_spills_is_built_and_fails_the_check(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    json_wanted: bool,
) -> None:
    assert run(monkeypatch, tmp_path, SPILLING, *(["--json"] if json_wanted else [])) == 1
    said = capsys.readouterr()
    errors = said.err.splitlines()
    assert [line.partition(":")[2].split(":")[0] for line in errors] == [
        " spilling on sm_80",
        " spilling on sm_90a",
    ]
    if json_wanted:
        found = json.loads(said.out)
        assert found["seconds"] > 0
        faulty = {row["kernel"]: row["spill_store_bytes"] > 0 for row in found["kernels"]}
        assert faulty == {"honest": False, "spilling": True}
    else:
        assert "SPILL" in said.out
    # A server still gets its kernels: slow is not wrong.
    assert build_cuda_library(tmp_path / "cache/qlinear", ["80", "90a"]).exists()


def test_a_library_without_a_kernel_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, 'extern "C" int ql_none() { return 0; }') == 1
    assert capsys.readouterr().err == (
        "error: ptxas said nothing of any kernel; expected a line for each\n"
    )
