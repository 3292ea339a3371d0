"""Rows between registered host memory and the device: every bit against torch's own index ops."""

import ctypes
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu.loading import RecordingKernels

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaPart, CudaRows, Status
from qlinear_service.kernels.torch_types import from_torch
from qlinear_service.slots import Slab, Slot

AREA_BYTES = 32 << 20
GAP = 0xA5
COLUMNS = (1, 2, 3, 7, 8, 63, 64, 200, 1001, 4095, 4096, 4100, 28672)
MOST_BLOCKS = (0, 1, 3, 8)
"""Of a launch; 0: as many as it takes."""

SIZES = ((1,), (2, 1), (3, 5, 1, 7), (64,), (65,), (1,) * 64, (1,) * 65, (300, 1, 211))


class Area:
    """A registered slab, and the rows of several calls in it."""

    def __init__(self, kernels: RecordingKernels) -> None:
        self.kernels = kernels
        self.most_blocks = 0
        self.slab = Slab(capacity_bytes=AREA_BYTES, largest_bytes=AREA_BYTES)
        status = kernels.library.ql_cuda_register(self.slab.address, AREA_BYTES, 0)
        kernels.runtime.check(status, "register")
        self.table = torch.empty(8 * 1024, dtype=torch.uint8, pin_memory=True)
        self.draw = torch.Generator().manual_seed(1)

    def close(self) -> None:
        torch.cuda.synchronize()
        assert self.kernels.library.ql_cuda_unregister(self.slab.address, 0) == Status.OK

    def parts(self, sizes: tuple[int, ...], row_bytes: int) -> list[memoryview]:
        """Return the bytes of parts, each in a slot of its own, all 0xA5.

        The first rows of a slot are skipped in turn, as in calls that are cut.
        """
        views = []
        for number, rows in enumerate(sizes):
            skipped = number % 3 * row_bytes
            slot = self.slab.acquire(skipped + rows * row_bytes)
            view = self.slab.view(slot)
            view[:] = bytes([GAP]) * len(view)
            views.append(view[skipped : skipped + rows * row_bytes])
        return views

    def rows(self, parts: list[memoryview], device: torch.Tensor, columns: int,
             host: torch.dtype) -> CudaRows:  # fmt: skip
        array = (CudaPart * len(parts))()
        row_bytes = columns * host.itemsize
        for place, view in zip(array, parts, strict=True):
            place.rows = ctypes.addressof(ctypes.c_char.from_buffer(view))
            place.count = len(view) // row_bytes
        made = CudaRows(
            parts=ctypes.addressof(array), parts_count=len(parts), table=self.table.data_ptr(),
            device_rows=device.data_ptr(), m=len(device), columns=columns,
            row_stride=device.stride(0) if len(device) > 1 else columns,
            host_dtype=from_torch(host), device_dtype=from_torch(device.dtype),
            most_blocks=self.most_blocks,
        )  # fmt: skip
        made.keep = array
        return made

    def run(self, entry: str, rows: CudaRows) -> None:
        stream = torch.cuda.current_stream()
        launch = self.kernels.runtime.launch(stream, entry)
        self.kernels.runtime.check(getattr(self.kernels.library, entry)(rows, launch), entry)
        stream.synchronize()

    def values(self, m: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Every bit pattern but NaN, which no comparison finds equal."""
        drawn = torch.randn((m, columns), generator=self.draw)
        drawn.view(-1)[::7] *= 1e5  # beyond fp16, and between its denormals
        drawn.view(-1)[::11] *= 1e-7
        return drawn.to(dtype)


@pytest.fixture
def area(kernels: RecordingKernels) -> Iterator[Area]:
    made = Area(kernels)
    yield made
    made.close()


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare bits, so that the two zeros differ."""
    kind = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.contiguous().view(kind), expected.contiguous().view(kind))


def fill(parts: list[memoryview], values: torch.Tensor) -> None:
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    end = 0
    for part in parts:
        begin, end = end, end + len(part)
        part[:] = data[begin:end]


def poison(
    m: int, columns: int, dtype: torch.dtype, gap: int, device: torch.device
) -> torch.Tensor:
    room = torch.full((m, columns + gap), 7.0, dtype=dtype, device=device)
    return room[:, :columns]


@pytest.mark.parametrize("most_blocks", MOST_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_gathered_rows_are_the_indexed_rows(
    area: Area, dtype: torch.dtype, is_permuted: bool, most_blocks: int
) -> None:
    device, area.most_blocks = area.kernels.device, most_blocks
    for columns in COLUMNS:
        order = torch.randperm(columns, generator=area.draw)
        on_device = order.int().to(device)
        for sizes in SIZES:
            m = sum(sizes)
            if m * columns * 4 > AREA_BYTES // 4:
                continue
            values = area.values(m, columns, dtype)
            parts = area.parts(sizes, columns * dtype.itemsize)
            fill(parts, values)
            expected = values[:, order] if is_permuted else values
            for gap in (0, 8 - columns % 8):
                out = poison(m, columns, dtype, gap, device)
                rows = area.rows(parts, out, columns, dtype)
                if is_permuted:
                    rows.permutation = on_device.data_ptr()
                area.run("ql_cuda_gather_rows", rows)
                assert same_bits(out.cpu(), expected), (columns, sizes, gap)
                whole = out.as_strided((m, columns + gap), (columns + gap, 1))
                assert (whole[:, columns:] == 7.0).all(), "it wrote beyond its rows"
            release_all(area)


@pytest.mark.parametrize("most_blocks", MOST_BLOCKS)
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_fp32_is_rounded_to_nearest_on_the_way(
    area: Area, to: torch.dtype, is_permuted: bool, most_blocks: int
) -> None:
    device, area.most_blocks = area.kernels.device, most_blocks
    for columns in COLUMNS:
        order = torch.randperm(columns, generator=area.draw)
        on_device = order.int().to(device)
        for sizes in ((1,), (3, 5, 1), (1,) * 65):
            values = area.values(sum(sizes), columns, torch.float32)
            parts = area.parts(sizes, columns * 4)
            fill(parts, values)
            out = poison(sum(sizes), columns, to, 3, device)
            rows = area.rows(parts, out, columns, torch.float32)
            if is_permuted:
                rows.permutation = on_device.data_ptr()
            area.run("ql_cuda_gather_rows", rows)
            expected = (values[:, order] if is_permuted else values).to(to)
            assert same_bits(out.cpu(), expected), (columns, sizes)
            release_all(area)


@pytest.mark.parametrize("most_blocks", MOST_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scattered_rows_are_in_their_slots_and_nothing_else_is(
    area: Area, dtype: torch.dtype, most_blocks: int
) -> None:
    area.most_blocks = most_blocks
    for columns in COLUMNS:
        for sizes in SIZES:
            m = sum(sizes)
            if m * columns * 4 > AREA_BYTES // 4:
                continue
            values = area.values(m, columns, dtype)
            parts = area.parts(sizes, columns * dtype.itemsize)
            source = values.to(area.kernels.device)
            area.run("ql_cuda_scatter_rows", area.rows(parts, source, columns, dtype))
            found = b"".join(bytes(part) for part in parts)
            assert found == values.view(torch.uint8).numpy().tobytes(), (columns, sizes)
            assert untouched(area, parts), (columns, sizes)
            release_all(area)


def untouched(area: Area, parts: list[memoryview]) -> bool:
    """Say whether all bytes of the slots outside of `parts` are as they were."""
    area_bytes = torch.frombuffer(area.slab._bytes, dtype=torch.uint8)
    mask = torch.zeros(len(area_bytes), dtype=torch.bool)
    for index, record in area.slab._records.items():
        mask[index * 1024 : index * 1024 + record.class_bytes] = True
    for part in parts:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(part)) - area.slab.address
        mask[begin : begin + len(part)] = False
    return bool((area_bytes[mask] == GAP).all())


def release_all(area: Area) -> None:
    for index, record in list(area.slab._records.items()):
        area.slab.release(Slot(index, record.generation))


@pytest.mark.parametrize("kind", ["copied", "rounded", "permuted", "scattered"])
def test_a_launch_has_no_more_blocks_than_it_may(area: Area, kind: str, tmp_path: Path) -> None:
    m, columns, device = 33, 20_000, area.kernels.device
    host = torch.float32 if kind == "rounded" else torch.float16
    parts = area.parts((m,), columns * host.itemsize)
    out = poison(m, columns, torch.float16, 0, device)
    order = torch.randperm(columns).int().to(device)
    entry = "ql_cuda_scatter_rows" if kind == "scattered" else "ql_cuda_gather_rows"
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profiled:
        for most_blocks in MOST_BLOCKS:
            area.most_blocks = most_blocks
            rows = area.rows(parts, out, columns, host)
            if kind == "permuted":
                rows.permutation = order.data_ptr()
            area.run(entry, rows)
    trace = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(trace))
    found = [event for event in json.loads(trace.read_text())["traceEvents"]
             if "_rows" in event.get("name", "") and "grid" in event.get("args", {})]  # fmt: skip
    launches = [event["args"] for event in sorted(found, key=lambda event: event["ts"])]
    assert [math.prod(launch["grid"]) for launch in launches][1:] == [1, 3, 8]
    assert math.prod(launches[0]["grid"]) >= m, "as many as it takes"
    assert all(math.prod(launch["block"]) == 1024 for launch in launches[1:])


def test_what_cannot_be_is_refused(area: Area) -> None:
    device, library = area.kernels.device, area.kernels.library
    out = torch.zeros((2, 8), dtype=torch.float16, device=device)
    launch = area.kernels.runtime.launch(torch.cuda.current_stream(), "refusals")
    parts = area.parts((2,), 16)

    def status(entry: str = "ql_cuda_gather_rows", **changes: object) -> int:
        rows = area.rows(parts, out, 8, torch.float16)
        for name, value in changes.items():
            setattr(rows, name, value)
        return int(getattr(library, entry)(rows, launch))

    scatter = "ql_cuda_scatter_rows"
    assert status() == status(scatter) == Status.OK
    assert status(m=-1) == status(m=3) == status(m=1) == status(row_stride=7) == Status.BAD_SHAPE
    assert status(columns=1 << 31) == status(most_blocks=-1) == Status.BAD_SHAPE
    assert status(host_dtype=9) == status(device_dtype=DType.F32) == Status.BAD_DTYPE
    assert status(scatter, host_dtype=DType.F32) == Status.BAD_DTYPE
    assert status(scatter, permutation=1) == Status.BAD_SHAPE
    assert status(parts=None) == status(device_rows=None) == Status.NULL_POINTER
    assert status(m=65, table=None) == Status.NULL_POINTER
    wide = 1 << 20
    out = torch.zeros((1, wide), dtype=torch.float16, device=device)
    (part,) = area.parts((1,), 2 * wide)
    rows = area.rows([part], out, wide, torch.float16)
    order = torch.arange(wide, dtype=torch.int32, device=device)
    rows.permutation = order.data_ptr()
    assert library.ql_cuda_gather_rows(rows, launch) == Status.BAD_SHAPE
    rows.permutation = None
    assert library.ql_cuda_gather_rows(rows, launch) == Status.OK
    torch.cuda.synchronize()


def test_no_rows_launch_nothing(area: Area) -> None:
    launch = area.kernels.runtime.launch(torch.cuda.current_stream(), "nothing")
    empty = CudaRows(columns=8, row_stride=8, host_dtype=DType.F16, device_dtype=DType.F16)
    assert area.kernels.library.ql_cuda_gather_rows(empty, launch) == Status.OK
    assert area.kernels.library.ql_cuda_scatter_rows(empty, launch) == Status.OK


def test_memory_that_is_registered_twice_or_not_at_all_is_an_error(area: Area) -> None:
    library = area.kernels.library
    assert library.ql_cuda_register(area.slab.address, AREA_BYTES, 0) == Status.CUDA_ERROR
    assert b"registering host memory" in library.ql_cuda_error_text()
    other = Slab(capacity_bytes=1 << 20, largest_bytes=1 << 20)
    assert library.ql_cuda_unregister(other.address, 0) == Status.CUDA_ERROR
    assert library.ql_cuda_register(None, 1, 0) == Status.NULL_POINTER
    assert library.ql_cuda_register(other.address, 0, 0) == Status.BAD_SHAPE
    assert not area.kernels.runtime.is_lost()
