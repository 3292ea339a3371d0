"""What the transport puts into slots and descriptors, and what it gives back when refused."""

import asyncio
from collections.abc import Sequence

import pytest
from batcher_harness import Harness

from qlinear_service.batching import Batch, BatchKey, WorkItem
from qlinear_service.codec import CallPlan, CheckedRequest
from qlinear_service.dtypes import DType
from qlinear_service.errors import Overloaded
from qlinear_service.layers import LayerSpec
from qlinear_service.pending import Settle
from qlinear_service.slots import Slab
from qlinear_service.transport import LocalTransport


def spec(module: str, n: int) -> LayerSpec:
    return LayerSpec(
        model="m",
        module=module,
        n=n,
        k=8,
        bits=4,
        group_size=-1,
        symmetric=True,
        has_bias=False,
        scale_dtype=DType.F16,
    )


def request(rows: int = 2) -> CheckedRequest:
    plan = CallPlan(
        layers=(spec("a", 500), spec("b", 12)),
        x_dtype=DType.F16,
        output_dtype=DType.F32,
        leading_shape=(rows,),
        rows=rows,
        priority=4,
        x_bytes=rows * 16,
        response_bytes=rows * 512 * 4,
        results=(),
        over_limit=None,
    )
    return CheckedRequest(plan, memoryview(bytes(range(rows * 16))))


class Setup:
    """A transport over a harness that remembers the items and frees their slots."""

    def __init__(self, *, capacity: int, rows: int = 1000) -> None:
        self.slab = Slab(capacity_bytes=capacity, largest_bytes=4096)
        self.harness = Harness(rows=rows)
        self.items: list[WorkItem] = []
        self.harness.batcher._ledger._release = lambda item: self.slab.release(item.slot)
        submit = self.harness.batcher.submit

        def remember(items: Sequence[WorkItem], settle: Settle) -> None:
            self.items += items
            submit(items, settle)

        self.harness.batcher.submit = remember  # type: ignore[method-assign]
        self.transport = LocalTransport(
            slab=self.slab,
            batcher=self.harness.batcher,
            clock=self.harness.clock,
            metrics=self.harness.metrics,
        )

    async def close(self) -> None:
        self.harness.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.harness.task


async def test_one_slot_and_one_descriptor_for_each_layer() -> None:
    setup = Setup(capacity=1 << 16)
    setup.harness.gate.clear()
    call = asyncio.create_task(setup.transport.call(request(), deadline=1e9))
    await setup.harness.entered.wait()
    first, second = setup.items
    assert first.key == BatchKey("m/a", DType.F16, DType.F32)
    assert second.key == BatchKey("m/b", DType.F16, DType.F32)
    assert first.slot == second.slot
    assert second.sequence > first.sequence
    for item in (first, second):
        assert (item.rows, item.nbytes, item.priority) == (2, 32, 4)
        assert item.deadline == 1e9
    assert bytes(setup.slab.view(first.slot)[:32]) == bytes(range(32))
    # Paid for by the larger side: 2 rows of 512 float32 results.
    assert setup.slab.used_bytes == 4096
    setup.harness.gate.set()
    assert len(await call) == 2
    assert setup.slab.used_bytes == 0
    await setup.close()


@pytest.mark.parametrize("limits", [{"capacity": 4096}, {"capacity": 1 << 16, "rows": 4}])
async def test_a_refused_call_leaves_nothing_behind(limits: dict[str, int]) -> None:
    """By bytes or by rows: nothing is queued and no slot is held for it."""
    setup = Setup(**limits)
    setup.harness.gate.clear()
    first = asyncio.create_task(setup.transport.call(request(), deadline=None))
    await setup.harness.entered.wait()
    used, items = setup.slab.used_bytes, len(setup.items)
    with pytest.raises(Overloaded):
        await setup.transport.call(request(), deadline=None)
    assert (setup.slab.used_bytes, len(setup.items)) == (used, items)
    setup.harness.gate.set()
    await first
    assert setup.slab.used_bytes == 0
    await setup.close()


async def test_a_caller_that_leaves_takes_its_call_back() -> None:
    setup = Setup(capacity=1 << 16)
    setup.harness.gate.clear()
    first = asyncio.create_task(setup.transport.call(request(), deadline=None))
    await setup.harness.entered.wait()
    second = asyncio.create_task(setup.transport.call(request(), deadline=None))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    setup.harness.gate.set()
    await first
    assert [len(batch) for batch in setup.harness.batches] == [1, 1]
    assert setup.slab.used_bytes == 0
    await setup.close()


async def test_an_answer_to_a_caller_that_was_cancelled_a_moment_ago_is_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task is cancelled and has not run since: the batcher does not know yet."""
    setup = Setup(capacity=1 << 16)
    caller = asyncio.create_task(setup.transport.call(request(), deadline=None))

    def leave(batch: Batch) -> None:
        if batch.key.layer == "m/b":  # the last one that the call needs
            caller.cancel()

    setup.harness.on_batch = leave
    with pytest.raises(asyncio.CancelledError):
        await caller
    while setup.slab.used_bytes:
        await asyncio.sleep(0)
    assert not caplog.records
    await setup.close()
