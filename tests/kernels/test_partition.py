"""How a product is cut for a GPU, and what the planner chooses, proven without one by g++ alone.

The checks stand in tests/csrc: each program prints how many it made in each section and how many
failed. The counts here keep a section from becoming empty unseen.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "partition": ("tests/csrc/partition_test.cpp",),
    "plan": (
        "tests/csrc/plan_test.cpp",
        "tests/csrc/plan_refusals.cpp",
        "csrc/cuda/plan.cpp",
        "csrc/cuda/plan_chain.cpp",
        "csrc/cuda/plan_entries.cpp",
        "csrc/cuda/plan_fed.cpp",
    ),
    "chain": (
        "tests/csrc/chain_test.cpp",
        "tests/csrc/chain_ring_test.cpp",
        "tests/csrc/chain_waits_test.cpp",
        "csrc/cuda/plan.cpp",
        "csrc/cuda/plan_chain.cpp",
        "csrc/cuda/plan_fed.cpp",
    ),
}
PARTS = (("plan", "0", "2"), ("plan", "1", "2"), ("partition",), ("chain",))
"""The programs' names, and which part of its work the longer one does."""

AT_LEAST = {
    "partition": {
        "swizzle_permutation": 55 * 8 * 16,
        "ldmatrix_banks": 55 * 16,
        "copy_banks": 55 * 8 * 2,
        "matrix_addresses": 200_000,
        "copy_addresses": 55 * 8 * 16 * 4,
        "descriptor": 55 * 8 * 16,
        "memory": 6 * 4 * 7 * 3 * 32,
        "partial_stores": 2500,
        "partial_loads": 2500,
        "every_step": 90_000,
        "stripes": 100_000,
        "slots": 100_000,
    },
    "plan": {
        "candidates": 50_000,
        "runnable": 4_000_000,
        "shared_memory": 4_000_000,
        "workspace": 4_000_000,
        "tiles": 4_000_000,
        "stripes": 4_000_000,
        "kernel": 4_000_000,
        "batch_invariant": 500_000,
        "refused_plans": 40,
        "refused_problems": 43,
        "refused_descriptions": 60,
        "fault_texts": 5,
    },
    "chain": {
        "shares": 401 * 200,
        "tiles": 506 * 200,
        "warps": 350,
        "groups": 2 * 16 * 136 * 2,
        "slots": 4 * 16 * 136 * 2,
        "memory": 16 * 136 * 2,
        "partial_sums": 2 * 16 * 136 * 2,
        "results": 16 * 31,
        "rows_of_x": 8 * (8 * 4 + 8 * 8) * 32,
        "rows_of_x_banks": 8 * (8 * 4 + 8 * 8) * 4,
        "registers": 2 * 16,
        "ring": 6 * 3 * (16 * 6 + 20),
        "waits": 4000,
    },
}


def compile_program(name: str, program: Path) -> None:
    """Compile one of the programs."""
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'csrc'}"]
    files = [str(ROOT / source) for source in SOURCES[name]]
    subprocess.run(["g++", *flags, *files, "-o", str(program)], check=True)


def output_of(folder: Path, part: tuple[str, ...]) -> str:
    """Run a part of a program; faults in words go to this test's own standard error."""
    command = [str(folder / part[0]), *part[1:]]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, int]]]:
    """Checks and faults by program and section."""
    folder = tmp_path_factory.mktemp("partition")
    for name in SOURCES:
        compile_program(name, folder / name)
    with ThreadPoolExecutor() as pool:  # they compute for a while, side by side
        printed = pool.map(lambda part: output_of(folder, part), PARTS)
        outputs = list(zip(PARTS, printed, strict=True))
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for part, output in outputs:
        sections = found.setdefault(part[0], {})
        for line in output.splitlines():
            section, checks, faults = line.split()
            before = sections.get(section, (0, 0))
            sections[section] = (before[0] + int(checks), before[1] + int(faults))
    return found


@pytest.mark.parametrize(
    ("program", "section"),
    [(program, section) for program, sections in AT_LEAST.items() for section in sections],
)
def test_no_check_fails(
    results: dict[str, dict[str, tuple[int, int]]], program: str, section: str
) -> None:
    checks, faults = results[program][section]
    assert faults == 0
    assert checks >= AT_LEAST[program][section]


def test_every_section_is_looked_at(results: dict[str, dict[str, tuple[int, int]]]) -> None:
    assert {name: set(sections) for name, sections in results.items()} == {
        name: set(sections) for name, sections in AT_LEAST.items()
    }
