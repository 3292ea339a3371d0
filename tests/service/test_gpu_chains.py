"""Layers of one call on a GPU: one chain of launches, where a batch has no others."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import torch
from fake_gpu import open_gates
from gpu_bench import LAYER, NAME, ORDERED, QUICK, Bench, MakeBench, N, benches, check, rows

from qlinear_service.batching import BatchKey, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.kernels import reference
from qlinear_service.ledger import Ledger
from qlinear_service.results import Outcome
from qlinear_service.slots import Slot


@pytest.fixture
async def new_bench() -> AsyncIterator[MakeBench]:
    async with benches() as make:
        yield make


def call_of(bench: Bench, x: torch.Tensor, *names: str) -> asyncio.Future[list[Outcome]]:
    """Send one call for several layers, whose items share a slot."""
    items = [bench.item(x, name) for name in names]
    for item in items[1:]:
        bench.slab.release(item.slot)
        item.slot = items[0].slot
    bench.slab._records[items[0].slot.index].users = len(items)
    bench.shared.add(items[0].slot)
    future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
    bench.batcher.submit(
        items, lambda answer: future.set_result(answer if isinstance(answer, list) else [])
    )
    return future


async def turns() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_layers_of_a_call_are_one_chain_of_launches(new_bench: MakeBench) -> None:
    """The second one does not wait for room behind the batch that has it."""
    bench = new_bench(chained=1)
    bench.gpu.gates["kernel"].clear()
    busy = bench.call(rows(1))
    await bench.reached("copy_in", 1)
    both = call_of(bench, rows(2, 3), NAME, ORDERED.spec.name)
    await turns()
    other = bench.call(rows(3))
    await bench.reached("copy_in", 3)
    await turns()
    assert [trip.layer for trip in bench.gpu.trips] == [LAYER, LAYER, ORDERED]
    open_gates(bench.gpu)
    first, second = await both
    check(first, rows(2, 3))
    check(second, rows(2, 3), ORDERED.spec.name)
    check((await busy)[0], rows(1))
    check((await other)[0], rows(3))


@pytest.mark.parametrize("why", ["no more stages", "a lone layer", "other layers", "cancelled"])
async def test_what_is_no_chain_waits_for_room(new_bench: MakeBench, why: str) -> None:
    bench = new_bench(chained=0 if why == "no more stages" else 1)
    bench.gpu.gates["kernel"].clear()
    names = (NAME, ORDERED.spec.name)
    busy = bench.call(rows(1))
    await bench.reached("copy_in", 1)
    both = call_of(bench, rows(3), *names)
    others = []
    if why == "a lone layer":
        others.append(bench.call(rows(4)))
    elif why == "other layers":
        others.append(call_of(bench, rows(5), NAME, NAME, ORDERED.spec.name))
    elif why == "cancelled":
        bench.batcher._queue.cancel(
            bench.batcher._ledger._pending[max(bench.batcher._ledger._pending)].item
        )
    await turns()
    assert len(bench.gpu.trips) == 2
    open_gates(bench.gpu)
    await busy
    await asyncio.gather(*others)
    if why != "cancelled":
        for name, outcome in zip(names, await both, strict=True):
            check(outcome, rows(3), name)


async def test_chains_of_many_callers_are_never_mixed_up(new_bench: MakeBench) -> None:
    bench = new_bench(chained=1)
    both = (NAME, ORDERED.spec.name)

    async def caller(number: int) -> None:
        x = rows(number)
        names = both if number % 2 else both[::-1]
        for name, outcome in zip(names, await call_of(bench, x, *names), strict=True):
            (piece,) = outcome.pieces
            y = torch.frombuffer(bytearray(piece), dtype=torch.float16).view(-1, N).float()
            layer = LAYER if name == NAME else ORDERED
            exact = reference.linear(layer, x, output_dtype=DType.F32)
            assert torch.allclose(y, exact, rtol=1e-2, atol=1e-3)

    for start in range(0, 200, 20):
        await asyncio.gather(*map(caller, range(start, start + 20)))
    assert bench.batcher.items_held == 0
    assert bench.slab.used_bytes == 0


class Taken:
    """A queue and a ledger with calls in them, each of some rows of some layers."""

    def __init__(self, *calls: tuple[int, str]) -> None:
        self.queue = WorkQueue(max_batch_rows=8, max_queue_rows=1000, max_age_seconds=60)
        self.ledger = Ledger(self.queue, lambda item: None)
        numbers = itertools.count(1)
        for count, layers in calls:
            items = [
                WorkItem(
                    sequence=next(numbers), key=BatchKey(layer, DType.F16, DType.F16), rows=count,
                    slot=Slot(0, 0), nbytes=0, enqueued_at=0.0,
                )
                for layer in layers
            ]  # fmt: skip
            self.queue.admit(items)
            self.ledger.enter(items, lambda answer: None)
        batch = self.queue.take(0.0)
        assert batch is not None
        self.batch = batch
        self.ledger.begin(batch, 0.0)

    def followers(self) -> list[tuple[str, int]]:
        """Layers that follow the first batch, and how many calls ask for each."""
        found = self.ledger.followers(self.batch)
        return [(items[0].key.layer, len(items)) for items in found]


def test_what_all_calls_of_a_batch_ask_for_follows_it() -> None:
    assert Taken((1, "abc"), (2, "abc")).followers() == [("b", 2), ("c", 2)]
    assert Taken((1, "abc"), (2, "abd")).followers() == []
    assert Taken((1, "abc"), (2, "ab")).followers() == []
    assert Taken((1, "a"), (2, "ab")).followers() == []
    assert Taken((1, "a")).followers() == []
    assert Taken((12, "ab")).followers() == [], "its first layer is not all taken"


def test_what_follows_is_taken_whole_or_not_at_all() -> None:
    taken = Taken((3, "ab"), (3, "ab"))
    (items,) = taken.ledger.followers(taken.batch)
    rows = taken.queue.rows
    follower = taken.queue.take_together(items)
    assert follower is not None
    assert [part.item for part in follower.parts] == list(items)
    assert (follower.rows, taken.queue.rows) == (6, rows - 6)
    assert taken.queue.take_together(items) is None, "it is gone"
    taken = Taken((3, "ab"), (3, "ab"), (3, "ac"))
    waiting = [pending.item for pending in taken.ledger._pending.values()]
    whole = [item for item in waiting if item.key.layer == "b"]
    assert taken.queue.take_together([*whole, *whole]) is None, "twelve rows are too many"
    taken.queue.cancel(whole[0])
    rows = taken.queue.rows
    assert taken.queue.take_together(whole) is None
    assert taken.queue.rows == rows


async def test_what_has_others_behind_it_is_not_waited_for(new_bench: MakeBench) -> None:
    bench = new_bench(roofline=QUICK, chained=1)
    await call_of(bench, rows(1), NAME, ORDERED.spec.name)
    assert [trip.alone for trip in bench.gpu.trips] == [False, False]
    await bench.call(rows(2))
    assert [trip.alone for trip in bench.gpu.trips] == [False, False, True]
