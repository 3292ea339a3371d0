"""Several layers on one x in one call of a library that pretends: what it is handed, answers."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import HostKernels
from random_layers import random_layer
from test_cuda_express import PINNED, Bench

from qlinear_service.dtypes import DType
from qlinear_service.gpu.express import Product, Trip
from qlinear_service.gpu.stages import places_of
from qlinear_service.gpu.together import TOGETHER
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear

K = 40
ROWS = 5
PLAIN = [pack(random_layer(n=n, k=K, group_size=32, seed=n)) for n in (24, 7, 70)]
ORDER = torch.randperm(K, generator=torch.Generator().manual_seed(9)).int()
PERMUTED = [
    pack(replace(random_layer(n=n, k=K, group_size=32, permuted=True, seed=n), k_permutation=ORDER))
    for n in (24, 33)
]
EVEN = [pack(random_layer(n=2112, k=64, group_size=64, seed=seed)) for seed in (1, 2)]
ONE_GROUP = [pack(random_layer(n=2112, k=64, group_size=-1, seed=seed)) for seed in (1, 2, 3)]
"""Each multiprocessor of the device has as much of them as any other: one launch."""


class Group:
    """Layers on the rows of two calls of three and two rows, and what comes of them."""

    def __init__(self, bench: Bench, layers: list[QuantizedLinear], dtypes: list[DType]) -> None:
        self.bench, self.layers = bench, layers
        self.y_dtypes = [dtypes[place % len(dtypes)] for place in range(len(layers))]

    def submit(self, x: torch.Tensor) -> None:
        slots, data = self.bench.slots, x.view(torch.uint8).view(-1)
        row_bytes = len(data) // ROWS
        slots[0, : 3 * row_bytes], slots[1, : 2 * row_bytes] = data.split(
            [3 * row_bytes, 2 * row_bytes]
        )
        more = [Product(*each) for each in zip(self.layers[1:], self.y_dtypes[1:], strict=True)]
        x_dtype = next(dtype for dtype in DType if to_torch(dtype) == x.dtype)
        self.bench.gpu.submit(
            Trip(
                layer=self.layers[0], stage=self.bench.stage, rows=ROWS, x_dtype=x_dtype,
                parts=[slots[0].data_ptr(), 3, slots[1].data_ptr(), 2],
                y_dtype=self.y_dtypes[0], way=TOGETHER, alone=False, more=more,
            )
        )  # fmt: skip

    def results(self) -> list[torch.Tensor]:
        sizes = [
            ROWS * layer.spec.n * dtype.itemsize
            for layer, dtype in zip(self.layers, self.y_dtypes, strict=True)
        ]
        host = self.bench.stage.y.host
        return [
            host[begin : begin + size].view(to_torch(dtype)).view(ROWS, -1)
            for begin, size, dtype in zip(places_of(sizes), sizes, self.y_dtypes, strict=True)
        ]

    def check(self, x: torch.Tensor) -> None:
        for y, layer, dtype in zip(self.results(), self.layers, self.y_dtypes, strict=True):
            assert torch.equal(y, self.bench.host.linear(layer, x, dtype))


@pytest.fixture
def bench(kernels: HostKernels) -> Iterator[Bench]:
    made = Bench(kernels)
    yield made
    made.library.fake_rows_reset()


def counts(bench: Bench) -> list[int]:
    names = ("row_gathers", "row_copies", "row_scatters", "chains")
    return [int(getattr(bench.library, f"fake_{name}")()) for name in names]


@pytest.mark.parametrize("layers", [PLAIN, PERMUTED, PLAIN[:1] * 2], ids=["plain", "order", "same"])
@pytest.mark.parametrize("dtypes", [[DType.F16], [DType.F32, DType.F16, DType.BF16]])
def test_x_is_gathered_once_and_all_products_are_one_chain(
    bench: Bench, layers: list[QuantizedLinear], dtypes: list[DType]
) -> None:
    group, x = Group(bench, layers, dtypes), torch.randn(ROWS, K).half()
    group.submit(x)
    assert counts(bench) == [1, 1, 0, 1]
    assert bench.gpu.wait(bench.stage.marks)
    group.check(x)
    again = torch.randn(ROWS, K).half()
    group.submit(again)
    group.check(again)
    assert len(bench.stage.prepared) == 1, "worked out once"
    assert torch.equal(bench.slots[0, : 3 * 2 * K], again[:3].view(torch.uint8).view(-1))


def test_what_the_chain_is_handed(bench: Bench) -> None:
    group, x = Group(bench, PLAIN, [DType.F32, DType.F16]), torch.randn(ROWS, K).half()
    group.submit(x)
    batch, stage = bench.last(), bench.stage
    assert batch.products_count == 3
    assert not batch.launch.plan, "that is whose?"
    params = batch.product[:3]
    assert {each.x for each in params} == {stage.x.device.data_ptr()}
    assert {(each.m, each.k, each.x_row_stride) for each in params} == {(ROWS, K, 40)}
    assert [each.n for each in params] == [24, 7, 70]
    begins = [each.y - stage.y.device.data_ptr() for each in params]
    assert begins == places_of([ROWS * 24 * 4, ROWS * 7 * 2, ROWS * 70 * 4]) == [0, 512, 768]
    assert batch.in_stream != batch.launch.stream != batch.out_stream
    assert batch.y_host == stage.y.host.data_ptr()
    for each, layer, plan in zip(params, PLAIN, batch.plans[:3], strict=True):
        alone = bench.host.plan(layer, ROWS, DType.F16, DType(each.y_dtype))
        assert bytes(plan[0]) == bytes(alone), "as alone: the same bits"


def test_float32_is_rounded_to_what_all_of_them_compute_with(bench: Bench) -> None:
    group, x = Group(bench, PLAIN, [DType.F32]), torch.randn(ROWS, K)
    group.submit(x)
    assert {each.x_dtype for each in bench.last().product[:3]} == {DType.F16}
    group.check(x.half())


def test_what_one_launch_computes_is_handed_no_plans_unless_bits_must_not_change(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(ROWS, 64).half()
    for layers, is_one in ((ONE_GROUP, True), (EVEN, False)):
        group = Group(bench, layers, [DType.F16])
        group.submit(x)
        batch = bench.last()
        length = bench.library.ql_cuda_chain_length(batch.product, len(layers), bench.host.info)
        assert length == (len(layers) if is_one else 0)
        assert bool(batch.plans) == (not is_one)
        group.check(x)
    bench.stage.prepared.clear()
    monkeypatch.setattr(bench.host, "batch_invariant", True)
    group = Group(bench, ONE_GROUP, [DType.F16])
    group.submit(x)
    assert bench.last().plans
    group.check(x)


def test_measured_plans_that_are_refused_are_left_out(bench: Bench) -> None:
    group, x = Group(bench, PLAIN, [DType.F16]), torch.randn(ROWS, K).half()
    bench.library.fake_refuse_plans(1)
    group.submit(x)
    assert not bench.last().plans
    group.check(x)


def test_a_failed_launch_writes_no_result_and_names_all_layers(bench: Bench) -> None:
    group, x = Group(bench, PLAIN, [DType.F16]), torch.randn(ROWS, K).half()
    group.submit(x)
    bench.stage.y.host.fill_(7)
    before = bench.slots.clone()
    bench.library.fake_fail(1)
    shapes = "k40_n24_b4_g32 and k40_n7_b4_g32 and k40_n70_b4_g32"
    with pytest.raises(RuntimeError, match=f"batch m=5 {shapes} on cpu: .*pretended failure"):
        group.submit(x)
    assert torch.equal(bench.slots, before)
    assert (bench.stage.y.host == 7).all()
    group.submit(x)
    group.check(x)


def test_kinds_of_groups_are_not_taken_for_each_other(bench: Bench) -> None:
    x = torch.randn(ROWS, K).half()
    groups = [
        Group(bench, PLAIN, [DType.F16]),
        Group(bench, PLAIN[:2], [DType.F16]),
        Group(bench, [PLAIN[0], PLAIN[2]], [DType.F16]),
        Group(bench, [PLAIN[0], PLAIN[2]], [DType.F16, DType.F32]),
    ]
    for group in (*groups, *groups):
        group.submit(x)
        group.check(x)
    assert len(bench.stage.prepared) == 4
    bench.gpu.submit(bench.trip(PINNED))
    assert bench.last().products_count == 0
    assert bench.last().launch.plan


def test_results_begin_where_kernels_store_sixteen_bytes() -> None:
    assert places_of([]) == []
    assert places_of([1, 256, 257, 0, 5]) == [0, 256, 512, 1024, 1024]
