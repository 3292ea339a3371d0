"""Whole batches in one call of the library: rows in, product, rows out, and the wait for them.

Every step that Python takes costs a batch about a microsecond, and a product of one row takes
fifteen: what a batch needs is worked out once for each stage, layer and number of rows. Knows no
slab and no batch, only addresses.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qlinear_service.dtypes import DType
from qlinear_service.gpu.stages import Stage, places_of
from qlinear_service.gpu.ways import TABLE_ROWS, Way
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.cuda_abi import CudaBatch, CudaPart, CudaPlan, Status
from qlinear_service.layers import QuantizedLinear

__all__ = ["Course", "Express", "Product", "Trip", "event_handle", "row_stride"]

MOST_PREPARED = 128
"""Kinds of batches that a stage remembers; then it forgets all of them."""

ROW_ALIGN = 8
"""Elements of a gathered row are padded to a multiple of it, so that kernels can load 16 bytes."""

ONE_PART = struct.Struct("=2q")


class Product(NamedTuple):
    """One layer of a trip."""

    layer: QuantizedLinear
    y_dtype: DType


class Trip:
    """A batch as a device sees it, or several of as many layers on the same rows.

    Args:
        layer: on the device.
        stage: buffers that are large enough.
        parts: address and rows of each part, one after the other.
        rows: of all parts.
        x_dtype: of the rows where they lie.
        y_dtype: of the results.
        way: how they travel.
        alone: nothing else is on the device, so nothing can overlap.
        more: further layers, if the device `chains`: their results are copied out behind those of
            the first, each where `places_of` says.
    """

    __slots__ = ("alone", "layer", "more", "parts", "rows", "stage", "way", "x_dtype", "y_dtype")

    def __init__(
        self, *, layer: QuantizedLinear, stage: Stage, parts: list[int], rows: int,
        x_dtype: DType, y_dtype: DType, way: Way, alone: bool, more: Sequence[Product] = (),
    ) -> None:  # fmt: skip
        self.layer, self.stage, self.parts, self.rows = layer, stage, parts, rows
        self.x_dtype, self.y_dtype, self.way, self.alone = x_dtype, y_dtype, way, alone
        self.more = more

    @property
    def products(self) -> list[Product]:
        """All layers, in order."""
        return [Product(self.layer, self.y_dtype), *self.more]


class _Prepared:
    """What one kind of batch needs in one stage."""

    __slots__ = ("batch", "kept", "operation", "x", "y")

    def __init__(self, batch: CudaBatch, operation: str, *kept: Any) -> None:
        self.batch, self.operation = batch, operation
        self.kept = kept
        """What the struct points to, and the layer, or its number could be that of another."""
        self.x, self.y = batch.x, batch.y


class Course:
    """What one stage needs to send batches on their way, and to wait for the one that is."""

    __slots__ = ("batch", "done", "parts", "took")

    def __init__(self) -> None:
        self.batch: CudaBatch | None = None
        """The one that is on its way; None: it went another way."""
        self.parts = (CudaPart * 64)()
        self.done = ctypes.c_int32()
        self.took = (ctypes.c_int64 * 3)()


class Express:
    """Sends batches on their way over three streams of one device, or over one.

    Args:
        kernels: of that device.
        streams: for rows in, products and rows out.
    """

    def __init__(self, kernels: CudaKernels, streams: tuple[torch.cuda.Stream, ...]) -> None:
        self._kernels = kernels
        self._in, self._compute, self._out = streams

    def takes(self, layer: QuantizedLinear, way: Way) -> bool:
        """Say whether batches of `layer` can go this way in one call."""
        return layer.spec.quantized and (way.gather or layer.k_permutation is None)

    def run(self, trip: Trip) -> None:
        """Put a batch on its way.

        Raises:
            RuntimeError: a step could not be launched; results were written nowhere.
        """
        stage = trip.stage
        key: tuple[Any, ...] = (
            *(id(trip.layer), trip.rows, trip.x_dtype, trip.y_dtype, trip.way, trip.alone),
            *((id(layer), y_dtype) for layer, y_dtype in trip.more),
        )
        prepared = stage.prepared.get(key)
        if prepared is None:
            prepared = self._prepare(trip)
            if len(stage.prepared) >= MOST_PREPARED:
                stage.prepared.clear()
            stage.prepared[key] = prepared
        course = stage.marks.course
        self._fill_parts(course, prepared, trip.parts)
        run = self._kernels.library.ql_cuda_run_batch
        status = run(prepared.batch)
        if status == Status.BAD_PLAN:  # a measured plan that rows of this x do not allow
            prepared.batch.launch.plan = prepared.batch.plans = None
            status = run(prepared.batch)
        if status != Status.OK:
            self._kernels.runtime.check(status, prepared.operation, self._compute)
        course.batch = prepared.batch

    def wait(self, course: Course, nanoseconds: int) -> bool:
        """Return whether the batch has ended; forever, if `nanoseconds` is negative.

        Raises:
            RuntimeError: something on the way has failed.
        """
        status = self._kernels.library.ql_cuda_wait_batch(
            course.batch, nanoseconds, course.done, course.took
        )
        if status != Status.OK:
            self._kernels.runtime.check(status, "a batch")
        return bool(course.done.value)

    @staticmethod
    def _fill_parts(course: Course, prepared: _Prepared, parts: list[int]) -> None:
        count = len(parts) // 2
        if count == 1:
            ONE_PART.pack_into(course.parts, 0, *parts)
        else:
            if count > len(course.parts):
                course.parts = (CudaPart * (2 * count))()
            struct.pack_into(f"={len(parts)}q", course.parts, 0, *parts)
        address = ctypes.addressof(course.parts)
        for rows in (prepared.x, prepared.y):
            rows.parts, rows.parts_count = address, count

    def _prepare(self, trip: Trip) -> _Prepared:
        layer, stage, way = trip.layer, trip.stage, trip.way
        spec, rows, products = layer.spec, trip.rows, trip.products
        operation = " and ".join(
            [f"batch m={rows} {spec.shape}", *(each.spec.shape for each, _ in trip.more)]
        )
        converts = way.gather and trip.x_dtype is DType.F32
        x_dtype = spec.compute_dtype if converts else trip.x_dtype
        all_params = self._params_of(trip, products, x_dtype)
        params, batch = all_params[0], CudaBatch()
        batch.product = ctypes.cast(all_params, ctypes.POINTER(LinearParams))
        batch.x.device_rows, batch.y.device_rows = params.x, params.y
        batch.x.m = batch.y.m = rows
        batch.x.columns, batch.y.columns = spec.k, spec.n
        batch.x.row_stride, batch.y.row_stride = params.x_row_stride, spec.n
        batch.x.host_dtype, batch.x.device_dtype = trip.x_dtype, x_dtype
        batch.y.host_dtype = batch.y.device_dtype = trip.y_dtype
        batch.x.table = stage.table.data_ptr()
        batch.y.table = batch.x.table + 8 * TABLE_ROWS
        if layer.k_permutation is not None:
            batch.x.permutation = layer.k_permutation.data_ptr()
        if not way.gather:
            batch.x_host = stage.x.host.data_ptr()
        if not way.scatter:
            batch.y_host = stage.y.host.data_ptr()
        self._set_streams(batch, stage.marks, operation, alone=trip.alone)
        plans = self._set_plans(batch, products, x_dtype)
        return _Prepared(batch, operation, products, all_params, plans)

    def _params_of(self, trip: Trip, products: Sequence[Product], x_dtype: DType) -> Any:
        """Return an array of LinearParams, one for each product."""
        stage, gathers = trip.stage, trip.way.gather
        found = (LinearParams * len(products))()
        sizes = [trip.rows * layer.spec.n * y_dtype.itemsize for layer, y_dtype in products]
        for place, ((layer, y_dtype), begin) in enumerate(
            zip(products, places_of(sizes), strict=True)
        ):
            known = self._kernels.known.of(layer, self._kernels.device).params
            params = LinearParams.from_buffer_copy(known)
            params.m, params.x_dtype, params.y_dtype = trip.rows, x_dtype, y_dtype
            params.x, params.y = stage.x.device.data_ptr(), stage.y.device.data_ptr() + begin
            params.x_row_stride = row_stride(layer.spec.k) if gathers else layer.spec.k
            params.y_row_stride = layer.spec.n
            found[place] = params
        return found

    def _set_plans(self, batch: CudaBatch, products: Sequence[Product], x_dtype: DType) -> Any:
        """Say how the products are cut, and return what must outlive that.

        Of those that are one launch nothing is said, or they would be several; others have the
        plans that each has alone, and its bits.
        """
        kernels, count, rows = self._kernels, len(products), batch.x.m
        if count > 1:
            batch.products_count = count
            length = kernels.library.ql_cuda_chain_length(batch.product, count, kernels.info)
            if length == count and not kernels.batch_invariant:
                return ()
        plans: list[CudaPlan] = [
            kernels.plan(layer, rows, x_dtype, y_dtype) for layer, y_dtype in products
        ]
        if count == 1:
            batch.launch.plan = ctypes.pointer(plans[0])
            return plans
        pointers = (ctypes.POINTER(CudaPlan) * count)(*map(ctypes.pointer, plans))
        batch.plans = ctypes.cast(pointers, ctypes.POINTER(ctypes.POINTER(CudaPlan)))
        return plans, pointers

    def _set_streams(self, batch: CudaBatch, marks: Any, operation: str, *, alone: bool) -> None:
        compute = self._compute
        with self._kernels.runtime.on(compute):
            launch = self._kernels.runtime.launch(compute, operation)
        batch.launch = launch
        first, second = (event_handle(event, compute) for event in marks.kernel)
        batch.launch.start_event, batch.launch.stop_event = first, second
        batch.in_start = event_handle(marks.in_start, compute)
        batch.out_stop = event_handle(marks.out_stop, compute)
        if alone:
            batch.in_stream = batch.out_stream = compute.cuda_stream
            batch.in_stop, batch.out_start = first, second
            return
        batch.in_stream, batch.out_stream = self._in.cuda_stream, self._out.cuda_stream
        batch.in_stop = event_handle(marks.in_stop, compute)
        batch.out_start = event_handle(marks.out_start, compute)


def row_stride(k: int) -> int:
    """Return the elements from one gathered row to the next."""
    return (k + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN


def event_handle(event: torch.cuda.Event, stream: torch.cuda.Stream) -> int:
    """Return what the library knows an event by; torch makes it at its first record."""
    if not event.cuda_event:
        event.record(stream)
    return int(event.cuda_event)
