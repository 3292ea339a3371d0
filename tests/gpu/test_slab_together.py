"""Layers of the same calls as one on a real GPU: gathered once, one chain, each its own results."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.alike import CUT_SUMS
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem
from gpu.running import rounded
from gpu.test_slab_chains import batcher_of
from gpu.test_slab_engine import Bench

from qlinear_service.batcher import Batcher
from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaFlag, Status
from qlinear_service.kernels.torch_types import from_torch, to_torch
from qlinear_service.results import Answer, BatchResult

K = 1024
FEATURES = (2112, 4224, 2112)
"""As much for each of an H200's multiprocessors: one launch. Elsewhere launches that overlap."""

UNEVEN = (520, 70, 257)
SIZES = ((1,), (2, 1), (3, 5, 1, 7), (9, 8), (1,) * 40, (1,) * 70, (90, 1, 33))
"""Rows of calls: up to 16 together are one launch; more than 64 need a table of addresses."""


class Group:
    """Problems on one x, and batches of the same calls for all of them.

    Args:
        kernels: what computes.
        features: of each layer.
        forms: of them; the order of columns is that of the first.
        exact: whether each result has one right value.
    """

    def __init__(
        self,
        kernels: RecordingKernels,
        features: tuple[int, ...] = FEATURES,
        form: Form | None = None,
        *,
        exact: bool = True,
    ) -> None:
        self.problems = [
            Problem(kernels.device, n, K, form, seed=seed, exact=exact)
            for seed, n in enumerate(features)
        ]
        order = self.problems[0].logical.k_permutation
        for problem in self.problems[1:]:
            if order is not None:
                # The same order in a tensor of its own, as checkpoints have it.
                problem.logical = replace(problem.logical, k_permutation=order.clone())
                problem.layer = replace(problem.layer, k_permutation=order.clone())
        self.bench = Bench(kernels, self.problems)
        self.library = kernels.library

    def batches(self, xs: list[torch.Tensor], output: DType = DType.F32) -> list[Batch]:
        """Return a batch of each layer, all on the rows of the same slots."""
        first = self.bench.batch(0, *xs, output=output, users=len(self.problems))
        made = [first]
        for number in range(1, len(self.problems)):
            key = BatchKey(f"layer{number}", first.key.x_dtype, output)
            parts = tuple(
                Part(
                    WorkItem(
                        sequence=next(self.bench.numbers), key=key, rows=item.rows,
                        slot=item.slot, nbytes=item.nbytes, enqueued_at=0.0,
                    ), start, count,
                )
                for item, start, count in first.parts
            )  # fmt: skip
            made.append(Batch(key, parts, first.rows))
        return made

    def release(self, batches: list[Batch]) -> None:
        for batch in batches:
            for part in batch.parts:
                self.bench.slab.release(part.item.slot)

    async def together(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Return the results of each layer, [m, n]."""
        assert self.bench.engine.goes_together(batches)
        return rows_of(batches, await self.bench.engine.run_together(batches))

    async def one_by_one(self, batches: list[Batch]) -> list[torch.Tensor]:
        results = [await self.bench.engine.run(batch) for batch in batches]
        return rows_of(batches, results)

    def is_one_launch(self, rows: int) -> bool:
        """Say whether the library computes them in one launch, by what the engine hands it."""
        batch = self.bench.engine._stages._free[-1].marks.course.batch  # given back last
        assert (batch.products_count, batch.product[0].m) == (len(self.problems), rows)
        info = self.bench.kernels.info
        return bool(self.library.ql_cuda_chain_length(batch.product, len(self.problems), info))


def rows_of(batches: list[Batch], results: list[BatchResult]) -> list[torch.Tensor]:
    found = []
    for batch, result in zip(batches, results, strict=True):
        assert not result.in_slots
        data = bytearray(b"".join(bytes(piece) for piece in result.rows))
        dtype = to_torch(batch.key.output_dtype)
        found.append(torch.frombuffer(data, dtype=dtype).view(batch.rows, -1))
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("features", "form"),
    [
        (FEATURES, Form()),
        (FEATURES, Form(group_size=-1, bias=torch.float16)),
        (FEATURES, Form(permuted=True)),
        (UNEVEN, Form(group_size=32, symmetric=False, permuted=True)),
        (UNEVEN, Form(bits=8)),
    ],
    ids=["even", "one group", "ordered", "uneven", "8 bits"],
)
def test_every_element_is_right(
    kernels: RecordingKernels, features: tuple[int, ...], form: Form, dtype: torch.dtype
) -> None:
    group = Group(kernels, features, form)

    async def run() -> None:
        for sizes in SIZES:
            xs = [group.problems[0].x(m, dtype) for m in sizes]
            batches = group.batches(xs)
            for turn in range(2):  # the second one finds all worked out
                found = await group.together(batches)
                for number, (y, problem) in enumerate(zip(found, group.problems, strict=True)):
                    exact = rounded(problem.product(torch.cat(xs)), torch.float32)
                    assert torch.equal(y, exact.cpu()), (sizes, number, turn)
            group.release(batches)

    asyncio.run(run())
    assert group.bench.slab.used_bytes == 0
    group.bench.close()


@pytest.mark.parametrize("output", [DType.F16, DType.F32])
def test_results_are_those_of_single_batches_within_rounding(
    kernels: RecordingKernels, output: DType
) -> None:
    """Those that are not one launch have the very plans of single batches, and their bits."""
    group = Group(kernels, exact=False)
    ways = set()

    async def run() -> None:
        for sizes in SIZES:
            xs = [group.problems[0].normal_x(m) for m in sizes]
            batches = group.batches(xs, output)
            found, x = await group.together(batches), torch.cat(xs)
            is_one = group.is_one_launch(len(x))
            ways.add(is_one)
            single = await group.one_by_one(batches)
            for y, other, problem in zip(found, single, group.problems, strict=True):
                if not is_one:
                    assert torch.equal(y, other), sizes
                bound = 2 * bound_of(problem, x, output)
                assert ((y.double() - other.double()).abs() <= bound.cpu()).all(), sizes
            again = await group.together(batches)
            assert all(map(torch.equal, found, again)), "the same bits every time"
            group.release(batches)

    asyncio.run(run())
    group.bench.close()
    if (kernels.info.major, kernels.info.sm_count) == (9, 132):
        assert ways == {True, False}


def bound_of(problem: Problem, x: torch.Tensor, output: DType) -> torch.Tensor:
    """Return how far from the exact product each element may be: closeness.py, on the device."""
    weights = problem.weights(0, problem.logical.spec.n)
    total = x.double().abs() @ weights.abs().T
    half_unit = {DType.F16: 2**-11, DType.F32: 2**-24}[output]
    rest = (half_unit + 2**-24) * problem.product(x).abs() + 2**-25
    return CUT_SUMS * ((K + 2) * 2**-24 * total + rest)


def test_batch_invariant_groups_have_every_bit_of_single_batches(
    invariant: RecordingKernels,
) -> None:
    assert CudaFlag.BATCH_INVARIANT in invariant.runtime.flags
    for features in (FEATURES, UNEVEN):
        group = Group(invariant, features, exact=False)

        async def run(group: Group = group) -> None:
            for sizes in SIZES:
                batches = group.batches([group.problems[0].normal_x(m) for m in sizes])
                found, single = await group.together(batches), await group.one_by_one(batches)
                assert all(map(torch.equal, found, single)), sizes
                group.release(batches)

        asyncio.run(run())
        group.bench.close()


def test_groups_and_single_batches_in_flight_together(kernels: RecordingKernels) -> None:
    """From the batcher on: calls for all layers, for one, and for two in another order."""
    group = Group(kernels)
    bench, problems = group.bench, group.problems
    sent: list[int] = []
    run_together = bench.engine.run_together

    async def noted(batches: Any) -> Any:
        sent.append(len(batches))
        return await run_together(batches)

    bench.engine.run_together = noted  # type: ignore[method-assign]

    async def caller(batcher: Batcher, number: int) -> None:
        layers = (1,) if number % 2 else ((0, 1, 2), (2, 0))[number // 30 % 2]
        x = problems[0].x(1 + number % 7, (torch.float16, torch.float32)[number // 5 % 2])
        data = x.cpu().view(torch.uint8).numpy().tobytes()
        slot = bench.slab.acquire(len(data), users=len(layers))
        bench.slab.view(slot)[: len(data)] = data
        now = asyncio.get_running_loop().time()
        items = [
            WorkItem(
                sequence=next(bench.numbers),
                key=BatchKey(f"layer{each}", from_torch(x.dtype), DType.F32),
                rows=len(x), slot=slot, nbytes=len(data), enqueued_at=now,
            )
            for each in layers
        ]  # fmt: skip
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        batcher.submit(items, done.set_result)
        outcomes = await done
        assert isinstance(outcomes, list), outcomes
        assert all(outcome.kernel_nanoseconds > 0 for outcome in outcomes)
        for each, outcome in zip(layers, outcomes, strict=True):
            joined = bytearray(b"".join(outcome.pieces))
            y = torch.frombuffer(joined, dtype=torch.float32).view(len(x), -1)
            exact = rounded(problems[each].product(x), torch.float32)
            assert torch.equal(y, exact.cpu()), (number, each)

    async def run() -> None:
        batcher = batcher_of(bench, together=bench.engine)
        task = asyncio.create_task(batcher.run())
        for start in range(0, 300, 30):
            await asyncio.gather(*(caller(batcher, start + i) for i in range(30)))
        assert batcher.items_held == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert {2, 3} <= set(sent)
    assert bench.slab.used_bytes == 0
    bench.close()


def test_a_chain_that_cannot_be_launched_leaves_activations_and_workspace_as_they_were(
    kernels: RecordingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(kernels)
    express = group.bench.streams._express
    prepare = express._prepare

    def without_weights(trip: Any) -> Any:
        made = prepare(trip)
        made.batch.product[1].qweight = None
        return made

    async def run() -> None:
        for sizes in ((4,), (30, 3)):  # one launch, and several of which the second fails
            xs = [group.problems[0].x(m) for m in sizes]
            batches = group.batches(xs)
            slots = [part.item.slot for part in batches[0].parts]
            before = [bytes(group.bench.slab.view(slot)) for slot in slots]
            with monkeypatch.context() as patch:
                patch.setattr(express, "_prepare", without_weights)
                with pytest.raises(RuntimeError, match=f"status {Status.NULL_POINTER:d}"):
                    await group.bench.engine.run_together(batches)
            for stage in group.bench.engine._stages._free:
                stage.prepared.clear()
            assert [bytes(group.bench.slab.view(slot)) for slot in slots] == before
            for y, problem in zip(await group.together(batches), group.problems, strict=True):
                exact = rounded(problem.product(torch.cat(xs)), torch.float32)
                assert torch.equal(y, exact.cpu())
            group.release(batches)

    asyncio.run(run())
    group.bench.close()
