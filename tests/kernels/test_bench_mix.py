"""The mix of decode and prefill, with stand-ins for GPU, library and events."""

import ctypes
import io
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import chain
import kernel_mix
from bench_stand_ins import StandInGpu, stand_in_library
from kernel_figures import Shape
from rich.console import Console

from qlinear_service.kernels.abi import LinearParams

BLOCK = (Shape("a", 256, 384), Shape("b", 384, 256))
ROWS = (1, 9)


class StandInMark:
    """An event on the CPU."""

    def record(self, stream: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: "StandInMark") -> float:
        return (other.at - self.at) * 1e3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of two small layers, three copies of it."""
    for module in (chain, kernel_mix):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(kernel_mix, "copies_for", lambda nbytes: 3)
    monkeypatch.setattr("kernel_peers.copies_for", lambda nbytes: 2)
    monkeypatch.setattr(kernel_mix, "new_mark", StandInMark)
    monkeypatch.setattr(kernel_mix, "chained", chain.one_by_one)  # a chain is the GPU's alone


def measured(spoil: Any = None) -> dict[str, Any]:
    gpu = StandInGpu()
    return kernel_mix.measure(gpu, stand_in_library(gpu, spoil), ROWS, 3) | {"machine": {}}


def test_a_mix_is_measured_beside_each_alone(small: None) -> None:
    found = measured()
    assert (found["wrong"], found["same_bits"]) == ([], True)
    assert [(one["name"], one["rows"]) for one in found["blocks"]] == [
        (name, m) for name in ("qlinear", "qlinear chain", "cuBLAS") for m in ROWS
    ]
    for one in found["blocks"]:
        assert one["ratio"] == pytest.approx(one["mix"]["us"] / one["alone"]["us"])
        assert one["mix"]["replays"] == 3
    assert all(len(orders) == len(BLOCK) for orders in found["orders"].values())
    whole = found["whole"]["cuBLAS"]["us"]
    assert found["round_us"]["cuBLAS"] == pytest.approx(len(ROWS) * whole)
    assert "WRONG" not in told(found)
    assert "in turn" in told(found)


def test_the_mix_takes_rows_in_turn_and_every_copy(small: None) -> None:
    gpu = StandInGpu()
    library = stand_in_library(gpu)
    calls: list[tuple[int, int]] = []
    real = library.functions.ql_cuda_linear

    def noted(params: Any, launch: Any) -> int:
        calls.append((params._obj.m, params._obj.qweight))
        return int(real(params, launch))

    library.functions.ql_cuda_linear = noted  # type: ignore[method-assign]
    ours = kernel_mix.Ours(gpu, library, ROWS)
    turns = [m for _ in range(ours.count) for m in ROWS]
    for at, m in enumerate(turns):
        ours.one_by_one(m, at)()
    assert [m for m, _ in calls[:: len(BLOCK)]] == [1, 9, 1, 9, 1, 9]
    assert len({weights for _, weights in calls}) == 3 * len(BLOCK)
    for m in ROWS:
        assert len({weights for rows, weights in calls if rows == m}) == 3 * len(BLOCK)


def test_layers_of_a_block_share_no_memory(small: None) -> None:
    layers = [copy for some in chain.block_copies(StandInGpu(), 3) for copy in some]
    for tensors in ([copy.qweight for copy in layers], [copy.scales for copy in layers]):
        places = sorted((t.data_ptr(), t.numel() * t.element_size()) for t in tensors)
        assert len(places) == 6
        assert all(at + size <= after for (at, size), (after, _) in pairwise(places))


def test_times_of_marks_go_to_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_mix, "new_mark", StandInMark)
    calls = [lambda seconds=seconds: time.sleep(seconds) for seconds in (0.002, 0.02, 0.002, 0.02)]
    gpu = StandInGpu()
    found = kernel_mix.marked(gpu, [1, 9, 1, 9], calls).replay(gpu)
    assert found.keys() == {1, 9}
    assert all(2e3 <= us < 18e3 for us in found[1])
    assert all(us >= 20e3 for us in found[9])


def told(found: dict[str, Any]) -> str:
    tables = io.StringIO()
    kernel_mix.print_report(Console(file=tables, width=200), found)
    return tables.getvalue()


def test_what_is_wrong_is_told(small: None) -> None:
    def spoil(params: LinearParams) -> None:
        if params.m == 9:
            ctypes.memset(params.y, 0x3C, 2 * params.n)

    found = measured(spoil)
    assert [text.partition(":")[0] for text in found["wrong"]] == ["a, M = 9", "b, M = 9"]
    assert "WRONG a, M = 9: " in told(found)
    assert "WRONG: results within the mix" in told(found | {"same_bits": False})


def test_results_that_differ_within_the_mix_are_noticed(small: None) -> None:
    gpu = StandInGpu()
    ours = kernel_mix.Ours(gpu, stand_in_library(gpu), ROWS)
    turns = [(m, at) for at, m in enumerate(m for _ in range(3) for m in ROWS)]
    last = {m: at % 3 for m, at in turns}
    calls = [ours.one_by_one(m, at) for m, at in turns]
    mix = gpu.record(calls)
    assert ours.mixed_alike(gpu, ours.one_by_one, mix, last)
    short = gpu.record(calls[:-1])
    assert not ours.mixed_alike(gpu, ours.one_by_one, short, last), "of the copy before"
    nothing = gpu.record([lambda: None])
    assert not ours.mixed_alike(gpu, ours.one_by_one, nothing, last), "not written"
    assert torch.isnan(ours.blocks[9].ys[1]).all()
