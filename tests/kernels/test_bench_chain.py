"""The benchmark of chains over stand-ins: what of their results it accepts, and what it tells."""

import ctypes
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import chain
from bench_stand_ins import StandInGpu, stand_in_library
from kernel_figures import Shape
from rich.console import Console

SMALL = (Shape("a", 128, 256), Shape("b", 256, 192), Shape("c", 128, 256), Shape("d", 256, 128))
KEYS = {
    *("rows", "floor_us", "floor_mib", "chain", "one_by_one", "chain_over_floor"),
    *("one_by_one_over_floor", "limit", "one_launch"),
    *("same_bits", "difference", "within_rounding"),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that a CPU computes at once, and of which few copies are cold enough."""
    monkeypatch.setattr(chain, "BLOCK", SMALL)
    monkeypatch.setattr(chain, "copies_for", lambda total: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def measured(spoil: Callable[[Any], None] | None = None, rows: int = 2) -> dict[str, Any]:
    gpu = StandInGpu()
    library = stand_in_library(gpu)
    library.functions.spoil_chain = spoil  # type: ignore[attr-defined]
    (found,) = chain.measure(gpu, library, [rows], 3)
    return found


def half(address: int, count: int) -> torch.Tensor:
    """Return what lies there."""
    room = (ctypes.c_int16 * count).from_address(address)
    return torch.frombuffer(room, dtype=torch.float16)


def test_a_chain_that_is_right() -> None:
    found = measured()
    assert found.keys() == KEYS
    assert (found["same_bits"], found["within_rounding"], found["difference"]) == (True, True, 0)
    assert (found["rows"], found["one_launch"], measured(rows=17)["one_launch"]) == (2, True, False)


def test_last_bits_may_differ_from_a_single_call() -> None:
    """Those of the last layer, which no other one has read meanwhile."""

    def spoil(params: Any) -> None:
        half(params[3].y, 2 * params[3].n).view(torch.int16).add_(1)

    found = measured(spoil)
    assert found["same_bits"]
    assert found["difference"] > 0
    assert found["within_rounding"]


def test_a_result_that_is_off_is_seen() -> None:
    def spoil(params: Any) -> None:
        y = half(params[3].y, params[3].n)
        y[5] += 0.05 * y.double().square().mean().sqrt()

    found = measured(spoil)
    assert (found["same_bits"], found["within_rounding"]) == (True, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_none_is_seen(value: float) -> None:
    found = measured(lambda params: half(params[0].y, 1).fill_(value))
    assert not found["same_bits"]
    assert not found["within_rounding"]


def test_bits_that_change_are_seen() -> None:
    turn = itertools.count()

    def spoil(params: Any) -> None:
        half(params[1].y, 1).view(torch.int16).add_(next(turn) % 2)

    assert not measured(spoil)["same_bits"]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [({}, 0), ({"same_bits": False}, 1), ({"within_rounding": False}, 1)],
    ids=str,
)
def test_either_is_a_failure(
    wrong: dict[str, bool], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(chain, "run", lambda bench, words: taken.append(bench) or 7)
    assert chain.main([]) == 7
    (bench,) = taken
    found = {"figures": [measured(), measured() | wrong], "machine": {}}
    assert int(not bench.is_right(found)) == code
    assert tuple(bench.rows) == (1, 4, 8, 12, 16, 32)
    out = Console(width=200, record=True, quiet=True)
    bench.show(out, found)
