"""Whole batches in one call of a library that pretends: what it is handed, and what it refuses."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import HostKernels
from random_layers import random_layer
from test_cuda_streams import LAYERS

from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineLost
from qlinear_service.gpu import express
from qlinear_service.gpu.express import Trip
from qlinear_service.gpu.stages import Stage
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.ways import TABLE_ROWS, Way
from qlinear_service.kernels.cuda_abi import CudaBatch
from qlinear_service.kernels.packing import pack

PLAIN, PERMUTED = LAYERS
SLAB = Way(gather=True, scatter=True)
PINNED = Way(gather=False, scatter=False)
K, N = 40, 24


class Bench:
    """One stage of a device, and rows that lie in two places."""

    def __init__(self, host: HostKernels) -> None:
        self.host, self.library = host, host.library
        self.library.fake_rows_reset()
        self.gpu = CudaStreams(host)
        self.stage = Stage(self.gpu)
        self.stage.grow(1 << 16, 1 << 16)
        self.x = torch.randn(5, K).half()
        self.slots = torch.zeros((2, 2048), dtype=torch.uint8)
        flat = self.x.view(torch.uint8).view(-1)
        self.slots[0, : 3 * 2 * K] = flat[: 3 * 2 * K]
        self.slots[1, : 2 * 2 * K] = flat[3 * 2 * K :]

    def trip(self, way: Way = SLAB, *, layer: object = PLAIN, alone: bool = False) -> Trip:
        parts = [self.slots[0].data_ptr(), 3, self.slots[1].data_ptr(), 2]
        if not way.gather:
            flat = self.x.view(torch.uint8).view(-1)
            self.stage.x.host[: len(flat)] = flat
        return Trip(
            layer=layer, stage=self.stage, parts=parts, rows=5, x_dtype=DType.F16,
            y_dtype=DType.F32, way=way, alone=alone,  # type: ignore[arg-type]
        )  # fmt: skip

    def results(self, way: Way) -> torch.Tensor:
        if not way.scatter:
            return self.stage.y.host[: 5 * N * 4].view(torch.float32).view(5, N)
        pieces = [self.slots[0, : 3 * N * 4], self.slots[1, : 2 * N * 4]]
        return torch.cat(pieces).view(torch.float32).view(5, N)

    def last(self) -> CudaBatch:
        batch = CudaBatch()
        self.library.fake_last_batch.argtypes = None
        self.library.fake_last_batch(express.ctypes.byref(batch))
        return batch


@pytest.fixture
def bench(kernels: HostKernels) -> Iterator[Bench]:
    made = Bench(kernels)
    yield made
    made.library.fake_rows_reset()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("way", [SLAB, PINNED, Way(gather=True, scatter=False)])
def test_each_way_gives_the_product(bench: Bench, way: Way, alone: bool) -> None:
    bench.gpu.submit(bench.trip(way, alone=alone))
    assert bench.gpu.wait(bench.stage.marks)
    expected = bench.host.linear(PLAIN, bench.x, DType.F32)
    assert torch.equal(bench.results(way), expected)
    counts = [int(getattr(bench.library, f"fake_row_{name}")()) for name in
              ("gathers", "scatters", "copies")]  # fmt: skip
    assert counts == [way.gather, way.scatter, 2 - way.gather - way.scatter]


def test_a_permuted_layer_is_brought_into_order_by_the_gather(bench: Bench) -> None:
    bench.gpu.submit(bench.trip(layer=PERMUTED))
    assert torch.equal(bench.results(SLAB), bench.host.linear(PERMUTED, bench.x, DType.F32))
    before = int(bench.library.fake_row_gathers())
    bench.gpu.submit(bench.trip(PINNED, layer=PERMUTED))
    assert torch.equal(bench.results(PINNED), bench.host.linear(PERMUTED, bench.x, DType.F32))
    assert int(bench.library.fake_row_gathers()) == before, "copies have no order to bring it into"


def test_a_lone_batch_has_one_stream_and_four_events(bench: Bench) -> None:
    bench.gpu.submit(bench.trip(alone=True))
    batch = bench.last()
    assert batch.in_stream == batch.out_stream == batch.launch.stream
    assert batch.in_stop == batch.launch.start_event
    assert batch.out_start == batch.launch.stop_event
    bench.gpu.submit(bench.trip())
    batch = bench.last()
    assert len({batch.in_stream, batch.out_stream, batch.launch.stream}) == 3
    outer = (batch.in_start, batch.in_stop, batch.out_start, batch.out_stop)
    assert len({*outer, batch.launch.start_event, batch.launch.stop_event}) == 6


def test_rows_are_padded_to_what_kernels_load_at_once(bench: Bench) -> None:
    odd = pack(random_layer(n=24, k=33, group_size=32))
    trip = bench.trip(layer=odd)
    bench.gpu.submit(trip)
    batch = bench.last()
    assert batch.x.row_stride == batch.product[0].x_row_stride == 40
    assert batch.y.table - batch.x.table == 8 * TABLE_ROWS
    assert torch.equal(
        bench.results(SLAB)[0],
        bench.host.linear(odd, bench.x.view(-1)[:33].view(1, 33).contiguous(), DType.F32)[0],
    )


def test_float32_is_asked_for_in_the_dtype_of_the_products(bench: Bench) -> None:
    trip = bench.trip()
    trip.x_dtype = DType.F32
    bench.gpu.submit(trip)
    batch = bench.last()
    assert (batch.x.host_dtype, batch.x.device_dtype) == (DType.F32, DType.F16)
    assert batch.product[0].x_dtype == DType.F16


def test_what_is_worked_out_is_kept_until_buffers_move(bench: Bench) -> None:
    for _ in range(3):
        bench.gpu.submit(bench.trip())
    assert len(bench.stage.prepared) == 1
    bench.gpu.submit(bench.trip(alone=True))
    assert len(bench.stage.prepared) == 2
    bench.stage.grow(1 << 22, 1 << 22)
    assert not bench.stage.prepared
    before = bench.last().product[0].x
    bench.slots[0, :240] = bench.x.view(torch.uint8).view(-1)[:240]
    bench.slots[1, :160] = bench.x.view(torch.uint8).view(-1)[240:]
    bench.gpu.submit(bench.trip())
    assert bench.last().product[0].x == bench.stage.x.device.data_ptr()
    assert before != bench.stage.x.device.data_ptr()
    assert torch.equal(bench.results(SLAB), bench.host.linear(PLAIN, bench.x, DType.F32))


def test_a_stage_does_not_remember_without_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(express, "MOST_PREPARED", 2)
    for way in (SLAB, PINNED, Way(gather=True, scatter=False)):
        bench.gpu.submit(bench.trip(way))
    assert len(bench.stage.prepared) == 1


def test_more_parts_than_before_have_room(bench: Bench) -> None:
    x = torch.randn(300, K).half()
    slots = torch.zeros((300, 128), dtype=torch.uint8)
    slots[:, : 2 * K] = x.view(torch.uint8).view(300, -1)
    trip = bench.trip()
    trip.rows = 300
    trip.parts = [word for slot in slots for word in (slot.data_ptr(), 1)]
    bench.gpu.submit(trip)
    found = slots[:, : 4 * N].contiguous().view(torch.float32)
    assert torch.equal(found, bench.host.linear(PLAIN, x, DType.F32))


def test_a_measured_plan_that_is_refused_is_left_out(bench: Bench) -> None:
    bench.library.fake_refuse_plans(1)
    bench.gpu.submit(bench.trip())
    assert not bench.last().launch.plan
    assert torch.equal(bench.results(SLAB), bench.host.linear(PLAIN, bench.x, DType.F32))


def test_a_failed_launch_writes_no_result(bench: Bench) -> None:
    before = bench.slots.clone()
    bench.library.fake_fail(2)
    with pytest.raises(RuntimeError, match=r"batch m=5 k40_n24_b4_g32 on cpu: .*pretended failure"):
        bench.gpu.submit(bench.trip())
    assert torch.equal(bench.slots, before)
    bench.library.fake_lose()
    with pytest.raises(RuntimeError) as lost:
        bench.gpu.submit(bench.trip())
    assert isinstance(bench.gpu.explained(lost.value), EngineLost)


def test_a_wait_may_end_before_the_batch(bench: Bench) -> None:
    bench.gpu.submit(bench.trip())
    bench.library.fake_pend(2)
    assert not bench.gpu.wait(bench.stage.marks, 1e-6)
    assert not bench.gpu.wait(bench.stage.marks, 1e-6)
    assert bench.gpu.wait(bench.stage.marks, 1e-6)
    bench.gpu.pair_nanoseconds = 2000
    assert bench.gpu.times(bench.stage.marks)[:3] == (3000, 7000, 4000)


def test_memory_that_cannot_be_registered_says_why(bench: Bench) -> None:
    assert bench.gpu.admit(bench.slots.data_ptr(), 4096) == ""
    assert int(bench.library.fake_registered()) == 4096
    bench.gpu.dismiss(bench.slots.data_ptr())
    assert int(bench.library.fake_registered()) == 0
    bench.library.fake_fail_registers(1)
    assert "registering 4096 bytes of host memory" in bench.gpu.admit(bench.slots.data_ptr(), 4096)


def test_a_permuted_row_must_fit_into_shared_memory(bench: Bench) -> None:
    room = bench.host.info.shared_bytes_per_block // 2

    def layer(k: int, order: object, *, quantized: bool = True) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(k=k, quantized=quantized), k_permutation=order)

    assert bench.gpu.can_gather(layer(room, "order"))
    assert not bench.gpu.can_gather(layer(room + 1, "order"))
    assert bench.gpu.can_gather(layer(room + 1, None))
    assert not bench.gpu.can_gather(layer(1, None, quantized=False))
