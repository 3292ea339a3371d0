"""In which order the host asks for the steps of a batch; a CUDA runtime that only takes notes.

The times that metrics show of a product are those between its two events. What the host does
between them counts as time of the device whenever the device has to wait for it.
"""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_tools import require_nvcc

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.build import SOURCE_ROOT
from qlinear_service.kernels.cuda_abi import CudaBatch, CudaDevice, CudaPart, CudaPlan, Status
from qlinear_service.kernels.nvcc import find_nvcc

NOTED = Path(__file__).parents[1] / "csrc" / "noted_cuda.cpp"
SOURCES = [
    SOURCE_ROOT / "cuda" / f"{name}.cpp"
    for name in (
        *("host", "linear", "pipeline", "rows", "fed_args", "tensor_map"),
        *("plan", "plan_chain", "plan_entries", "plan_fed"),
    )
]
IN, COMPUTE, OUT = 101, 102, 103
IN_START, IN_STOP, START, STOP, OUT_START, OUT_STOP = range(1, 7)
ADDRESS = 1 << 20
"""Where everything pretends to lie; nobody looks."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    require_nvcc()
    built = tmp_path_factory.mktemp("noted") / "libnoted.so"
    words = ["-std=c++17", "-O1", "-shared", "--cudart=none", "-Xcompiler=-fPIC,-Wall,-Werror"]
    words += [f"-I{SOURCE_ROOT}", '-DQL_CUDA_ARCHITECTURES="90a"', "-o", str(built)]
    subprocess.run([find_nvcc()[0], *words, *map(str, SOURCES), str(NOTED)], check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.noted.restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def batch() -> Iterator[CudaBatch]:
    """Sixteen rows of one call for a layer that the copy engine feeds, on three streams."""
    m, n, k = 16, 8192, 8192
    params = LinearParams(m=m, n=n, k=k, x_row_stride=k, y_row_stride=n, group_size=128, bits=4)
    params.x = params.qweight = params.scales = params.y = ADDRESS
    params.x_dtype = params.compute_dtype = params.scale_dtype = DType.F16
    params.y_dtype = params.bias_dtype = DType.F16
    part = CudaPart(rows=ADDRESS, count=m)
    made = CudaBatch(product=ctypes.pointer(params))
    for rows, columns in ((made.x, k), (made.y, n)):
        rows.parts, rows.parts_count = ctypes.addressof(part), 1
        rows.m, rows.columns, rows.row_stride, rows.device_rows = m, columns, columns, ADDRESS
        rows.host_dtype = rows.device_dtype = DType.F16
    made.in_stream, made.launch.stream, made.out_stream = IN, COMPUTE, OUT
    made.in_start, made.in_stop = IN_START, IN_STOP
    made.launch.start_event, made.launch.stop_event = START, STOP
    made.out_start, made.out_stop = OUT_START, OUT_STOP
    made.launch.workspace, made.launch.workspace_bytes = ADDRESS, 1 << 30
    yield made
    del part


def steps(library: ctypes.CDLL, batch: CudaBatch, status: Status = Status.OK) -> list[str]:
    """Return what the runtime was asked for; the maps of the copy engine in one."""
    library.noted_reset()
    assert library.ql_cuda_run_batch(ctypes.byref(batch)) == status
    found = library.noted().decode().split(", ")
    return [one for place, one in enumerate(found) if one != "describe" or not place]


def test_nothing_lies_between_a_product_and_its_events(
    library: ctypes.CDLL, batch: CudaBatch
) -> None:
    """All that the host works out comes before the rows move, in whose time it gets ahead."""
    assert steps(library, batch) == [
        "describe",
        *(f"record {IN_START} {IN}", f"gather {IN}", f"record {IN_STOP} {IN}"),
        f"wait {IN_STOP} {COMPUTE}",
        *(f"record {START} {COMPUTE}", f"product {COMPUTE}", f"record {STOP} {COMPUTE}"),
        f"wait {STOP} {OUT}",
        *(f"record {OUT_START} {OUT}", f"scatter {OUT}", f"record {OUT_STOP} {OUT}"),
    ]


def test_copies_take_the_same_way(library: ctypes.CDLL, batch: CudaBatch) -> None:
    batch.x_host = batch.y_host = ADDRESS
    found = steps(library, batch)
    assert found[0] == "describe"
    assert [one for one in found if "copy" in one] == [f"copy {IN}", f"copy {OUT}"]
    assert found.index(f"product {COMPUTE}") == found.index(f"record {START} {COMPUTE}") + 1


def test_results_of_parts_are_copied_where_they_belong_and_nothing_need_be_timed(
    library: ctypes.CDLL, batch: CudaBatch
) -> None:
    counts, places = (9, 6, 1), (5 << 20, 3 << 20, 7 << 20)
    parts = (CudaPart * 3)(*map(CudaPart, places, counts))
    batch.y.parts, batch.y.parts_count = ctypes.addressof(parts), len(parts)
    batch.copies_parts = 1
    batch.in_start = batch.launch.start_event = batch.out_start = None
    assert steps(library, batch) == [
        "describe",
        *(f"gather {IN}", f"record {IN_STOP} {IN}", f"wait {IN_STOP} {COMPUTE}"),
        *(f"product {COMPUTE}", f"record {STOP} {COMPUTE}", f"wait {STOP} {OUT}"),
        *([f"copy {OUT}"] * len(parts)),
        f"record {OUT_STOP} {OUT}",
    ]
    copies = (ctypes.c_uint64 * 3 * 64)()
    row_bytes = 2 * batch.y.columns
    assert library.noted_copies(copies) == 3
    for copy, place, before, count in zip(copies, places, (0, 9, 15), counts, strict=False):
        assert list(copy) == [place, ADDRESS + before * row_bytes, count * row_bytes]
    parts[1].count = 5
    assert steps(library, batch, Status.BAD_SHAPE) == [""], "a row of no part"
    parts[1].count, parts[2].rows = 6, None
    assert steps(library, batch, Status.NULL_POINTER) == [""]
    parts[2].rows = places[2]
    batch.in_start = IN_START
    assert steps(library, batch, Status.NULL_POINTER) == [""], "all three events or none"


def test_on_one_stream_events_stand_for_two(library: ctypes.CDLL, batch: CudaBatch) -> None:
    batch.in_stream = batch.out_stream = COMPUTE
    batch.in_stop, batch.out_start = START, STOP
    assert steps(library, batch) == [
        "describe",
        *(f"record {IN_START} {COMPUTE}", f"gather {COMPUTE}", f"record {START} {COMPUTE}"),
        *(f"product {COMPUTE}", f"record {STOP} {COMPUTE}"),
        *(f"scatter {COMPUTE}", f"record {OUT_STOP} {COMPUTE}"),
    ]


@pytest.mark.parametrize("alone", [False, True])
def test_a_product_waits_for_an_event_before_its_first_one(
    library: ctypes.CDLL, batch: CudaBatch, alone: bool
) -> None:
    """Else the wait would count as time of the product."""
    if alone:
        batch.in_stream = batch.out_stream = COMPUTE
        batch.in_stop, batch.out_start = START, STOP
    batch.after = 77
    found = steps(library, batch)
    place = found.index(f"wait 77 {COMPUTE}")
    assert found[place + 1 : place + 3] == [f"record {START} {COMPUTE}", f"product {COMPUTE}"]
    moved = found.index(f"gather {COMPUTE if alone else IN}")
    assert moved < place, "rows move meanwhile"
    batch.after = None
    assert steps(library, batch) == [one for one in found if one != f"wait 77 {COMPUTE}"]


def test_a_batch_chooses_its_device_once_and_gives_it_back(
    library: ctypes.CDLL, batch: CudaBatch
) -> None:
    """Each step alone would: three times as many calls of the driver."""
    steps(library, batch)
    assert library.noted_device_calls() == 2, "which one is current, and another"
    library.cudaSetDevice(7)
    for _ in range(2):
        steps(library, batch)
        assert library.noted_device_calls() == 3, "back again"
    launch = batch.launch
    assert library.ql_cuda_scatter_rows(ctypes.byref(batch.y), ctypes.byref(launch)) == Status.OK
    assert library.noted_device_calls() == 6, "a step that is none of a batch chooses for itself"
    current = ctypes.c_int(-1)
    library.cudaGetDevice(ctypes.byref(current))
    assert current.value == 7
    library.cudaSetDevice(0)


def test_a_product_that_cannot_be_launched_moves_no_rows(
    library: ctypes.CDLL, batch: CudaBatch
) -> None:
    plan = CudaPlan(token_blocks=3)
    batch.launch.plan = ctypes.pointer(plan)
    assert steps(library, batch, Status.BAD_PLAN) == [""]


@pytest.mark.parametrize("wrong", [{}, {"sm_count": 0}, {"sm_count": -1}, {"major": 0}], ids=str)
def test_a_plan_is_refused_for_what_no_gpu_can_be(
    library: ctypes.CDLL, batch: CudaBatch, wrong: dict[str, int]
) -> None:
    """Where the GPU's library plans without being asked through the planner's other entries."""
    values = {"major": 9, "sm_count": 132, "shared_bytes_per_block": 232448}
    device = CudaDevice(shared_bytes_per_sm=233472, **(values | wrong))
    plan, asked = CudaPlan(), (batch.product, ctypes.byref(device), 0)
    status = library.ql_cuda_plan_linear(*asked, ctypes.byref(plan))
    assert status == (Status.BAD_DESCRIPTION if wrong else Status.OK)
    assert (plan.token_blocks > 0) == (not wrong)
    device.shared_bytes_per_block = 1024
    if not wrong:
        assert library.ql_cuda_plan_linear(*asked, ctypes.byref(plan)) == Status.BAD_PLAN
        library.ql_cuda_error_text.restype = ctypes.c_char_p
        assert b"too little shared memory or too many tiles" in library.ql_cuda_error_text()


@pytest.fixture
def chain(batch: CudaBatch) -> Iterator[CudaBatch]:
    """The same rows for three layers, of 8192, 1024 and 4096 features, with gaps in between."""
    params = (LinearParams * 3)(*[batch.product[0]] * 3)
    at = batch.product[0].y
    for each, n in zip(params, (8192, 1024, 4096), strict=True):
        each.n = each.y_row_stride = n
        each.y, at = at, at + each.m * n * 2 + 512
    batch.product, batch.products_count = ctypes.cast(params, type(batch.product)), 3
    batch.y_host = ADDRESS
    yield batch
    del params


def test_several_products_on_one_x_are_one_chain_between_one_pair_of_events(
    library: ctypes.CDLL, chain: CudaBatch
) -> None:
    expected = [
        *(f"record {IN_START} {IN}", f"gather {IN}", f"record {IN_STOP} {IN}"),
        f"wait {IN_STOP} {COMPUTE}",
        *(f"record {START} {COMPUTE}", f"chain of 3 {COMPUTE}", f"record {STOP} {COMPUTE}"),
        f"wait {STOP} {OUT}",
        *(f"record {OUT_START} {OUT}", f"copy {OUT}", f"record {OUT_STOP} {OUT}"),
    ]
    assert steps(library, chain) == expected
    library.noted_bytes.restype = ctypes.c_size_t
    assert library.noted_bytes() == 16 * 2 * (8192 + 1024 + 4096) + 2 * 512, "gaps and all"
    plans = (ctypes.POINTER(CudaPlan) * 3)()
    chain.plans = ctypes.cast(plans, ctypes.POINTER(ctypes.POINTER(CudaPlan)))
    assert f"planned chain of 3 {COMPUTE}" in steps(library, chain)


def test_a_chain_of_products_that_do_not_belong_together_is_refused(
    library: ctypes.CDLL, chain: CudaBatch
) -> None:
    def refused(status: Status) -> None:
        assert steps(library, chain, status) == [""]

    first, second, last = (chain.product[place] for place in range(3))
    changes = [
        (second, "m", 15, Status.BAD_SHAPE),
        (second, "k", 4096, Status.BAD_SHAPE),
        (last, "x", ADDRESS + 2, Status.BAD_SHAPE),
        (last, "x_row_stride", 8200, Status.BAD_SHAPE),
        (last, "x_dtype", DType.BF16, Status.BAD_DTYPE),
        (second, "y_row_stride", 1032, Status.BAD_SHAPE),
        (second, "y", first.y + 16 * 8192 * 2 - 2, Status.BAD_SHAPE),
        (last, "y", first.y, Status.BAD_SHAPE),
        (chain, "y_host", None, Status.NULL_POINTER),
        (chain, "products_count", -1, Status.BAD_SHAPE),
        (chain, "copies_parts", 1, Status.BAD_SHAPE),
    ]
    for struct, name, value, status in changes:
        before = getattr(struct, name)
        setattr(struct, name, value)
        refused(status)
        setattr(struct, name, before)
    plan = CudaPlan()
    chain.launch.plan = ctypes.pointer(plan)
    refused(Status.BAD_PLAN)
    chain.launch.plan = None
    assert steps(library, chain)
