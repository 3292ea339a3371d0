"""The engine with plain torch: every caller's rows, whatever shares its batch."""

import asyncio
import itertools
import threading

import pytest
import torch
from random_layers import random_layer

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.dtypes import DType
from qlinear_service.engine import Engine, WorkerThread
from qlinear_service.kernels import reference
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.slots import Slab

K, N = 40, 24
LAYER = pack(random_layer(n=N, k=K, group_size=32, bias=True))
NAME = LAYER.spec.name
numbers = itertools.count(1)


class Counting(TorchKernels):
    """Remembers what it was handed."""

    def __init__(self) -> None:
        self.pointers: list[int] = []

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        self.pointers.append(x.data_ptr())
        return super().linear(layer, x, output_dtype)


class Bench:
    """An engine and its slab."""

    def __init__(self, kernels: TorchKernels | None = None) -> None:
        self.slab = Slab(capacity_bytes=1 << 20, largest_bytes=1 << 18)
        self.kernels = kernels or Counting()
        self.engine = Engine(kernels=self.kernels, registry=LayerRegistry([LAYER]), slab=self.slab)

    def item(self, x: torch.Tensor, output_dtype: DType, x_dtype: DType) -> WorkItem:
        data = x.view(torch.uint8).numpy().tobytes()
        slot = self.slab.acquire(len(data))
        # What a slot held before lies behind this call's bytes.
        self.slab.view(slot)[:] = b"\xff" * len(self.slab.view(slot))
        self.slab.view(slot)[: len(data)] = data
        return WorkItem(
            sequence=next(numbers),
            key=BatchKey(NAME, x_dtype, output_dtype),
            rows=x.shape[0],
            slot=slot,
            nbytes=len(data),
            enqueued_at=0.0,
        )


def batch_of(*items: WorkItem) -> Batch:
    parts = tuple(Part(item, 0, item.rows) for item in items)
    return Batch(items[0].key, parts, sum(item.rows for item in items))


def tensor(rows: memoryview, dtype: DType) -> torch.Tensor:
    return torch.frombuffer(bytearray(rows), dtype=to_torch(dtype)).view(-1, N)


@pytest.mark.parametrize("output_dtype", list(DType))
@pytest.mark.parametrize("x_dtype", list(DType))
@pytest.mark.parametrize("sizes", [(1,), (7,), (1, 1), (3, 1, 5), (1,) * 30])
def test_each_part_gets_its_own_rows(
    sizes: tuple[int, ...], x_dtype: DType, output_dtype: DType
) -> None:
    bench = Bench()
    xs = [torch.randn(size, K).to(to_torch(x_dtype)) for size in sizes]
    items = [bench.item(x, output_dtype, x_dtype) for x in xs]
    result = bench.engine.run(batch_of(*items))
    assert result.kernel_nanoseconds > 0
    expected = reference.linear(LAYER, torch.cat(xs), output_dtype=output_dtype).split(sizes)
    for rows, y in zip(result.rows, expected, strict=True):
        assert torch.equal(tensor(rows, output_dtype), y)


def test_one_part_is_viewed_in_its_slot_and_many_share_one_stage() -> None:
    kernels = Counting()
    bench = Bench(kernels)
    items = [bench.item(torch.randn(2, K).half(), DType.F16, DType.F16) for _ in range(3)]
    for chosen in (items[:1], items[1:2], items, items):
        bench.engine.run(batch_of(*chosen))
    slots = [
        torch.frombuffer(bench.slab.view(item.slot), dtype=torch.uint8).data_ptr() for item in items
    ]
    assert kernels.pointers[:2] == slots[:2]
    assert kernels.pointers[2] not in slots
    assert kernels.pointers[2] == kernels.pointers[3]


def test_results_outlive_the_next_batch() -> None:
    bench = Bench()
    xs = [torch.randn(4, K).half() for _ in range(2)]
    items = [bench.item(x, DType.F16, DType.F16) for x in xs]
    first = bench.engine.run(batch_of(*items))
    kept = [bytes(rows) for rows in first.rows]
    bench.engine.run(batch_of(*reversed(items)))
    assert [bytes(rows) for rows in first.rows] == kept


def test_pieces_of_a_cut_item_add_up_to_it() -> None:
    bench = Bench()
    x = torch.randn(11, K).half()
    item = bench.item(x, DType.F16, DType.F16)
    pieces = [
        bench.engine.run(Batch(item.key, (Part(item, start, rows),), rows)).rows[0]
        for start, rows in ((0, 4), (4, 4), (8, 3))
    ]
    joined = tensor(memoryview(b"".join(pieces)), DType.F16)
    # As many rows at a time: torch may add up in another order for others.
    expected = torch.cat([reference.linear(LAYER, rows) for rows in x.split(4)])
    assert torch.equal(joined, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_touch_no_other_row(bad: float) -> None:
    xs = [torch.randn(2, K).half() for _ in range(3)]

    def results() -> list[torch.Tensor]:
        bench = Bench()
        items = [bench.item(x, DType.F16, DType.F16) for x in xs]
        return [tensor(rows, DType.F16) for rows in bench.engine.run(batch_of(*items)).rows]

    # As many rows both times: torch may add up in another order for others.
    before = results()
    xs[1][0, 5] = bad
    after = results()
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert torch.equal(after[1][1], before[1][1])
    assert before[1][0].isfinite().all()
    assert not after[1][0].isfinite().any()


class WrongShape(TorchKernels):
    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        return super().linear(layer, x, output_dtype)[:-1]


class WrongDtype(TorchKernels):
    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        return super().linear(layer, x, DType.F32)


@pytest.mark.parametrize("kernels", [WrongShape(), WrongDtype()])
def test_a_kernel_that_returns_something_else_is_caught(kernels: TorchKernels) -> None:
    bench = Bench(kernels)
    item = bench.item(torch.randn(2, K).half(), DType.F16, DType.F16)
    with pytest.raises(RuntimeError, match="kernels 'torch' returned"):
        bench.engine.run(batch_of(item))


async def test_the_worker_runs_on_its_own_thread_and_hands_back_results_and_errors() -> None:
    worker = WorkerThread("engine under test")
    thread = await worker.run(threading.current_thread)
    assert thread.name == "engine under test"
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    assert await worker.run(max, 2, 3) == 3
    assert worker.stop(5)


async def test_a_waiter_that_left_does_not_disturb_the_worker() -> None:
    worker = WorkerThread("engine under test")
    gate = threading.Event()
    waiting = asyncio.create_task(worker.run(gate.wait))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not worker.stop(0)
    gate.set()
    assert worker.stop(5)
