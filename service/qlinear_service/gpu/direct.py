"""A GPU that the native dispatcher sends batches to, and the engine for those that it cannot send.

It needs room for each batch in flight (room.py), the addresses of all layers, and the plan of each
product, which it is taught when it first meets one. Sees no caller.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from qlinear_service.batching import Batch
from qlinear_service.config import SMALLEST_SLOT_BYTES
from qlinear_service.dispatch.abi import DispatchLayer, DispatchOptions, DispatchStage, QueueLimits
from qlinear_service.dispatch.native import NativeDispatch
from qlinear_service.dtypes import DType
from qlinear_service.engine import WorkerThread
from qlinear_service.errors import EngineLost
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.room import Room
from qlinear_service.gpu.streams import SHORTEST_NANOSECONDS, CudaStreams
from qlinear_service.gpu.ways import TABLE_ROWS
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.layers import QuantizedLinear
from qlinear_service.results import BatchResult
from qlinear_service.slots import Slab

__all__ = ["STAGES", "DirectEngine"]

STAGES = 3
"""Batches in flight unless told otherwise: one comes in, one is computed, one goes out."""

TAUGHT_ROWS = 64
"""Batches of up to so many rows are known from the start, for x and results of a layer's own dtype;
others when they first come."""

SPARE = 4
"""Multiprocessors that products leave to the kernels that move rows of other batches. Many plans
use 128 of an H200's 132 anyway, and are as they were."""

LEAST_TO_SPARE = 64
"""A device with fewer multiprocessors leaves none."""

SPINNING = 1
"""Threads of the dispatcher that keep a core busy where there are enough: the one that sends
batches sees how they end, too. A second one gained nothing (decision 0011)."""

TIMED_EACH = 8
"""Of so many batches of a layer that follow each other closely one is timed: that costs it some
microseconds (decision 0011, point 13)."""

COPIED_ROW_BYTES = 32 << 10
"""Rows of results so long go out by the copy engine; 0: none do."""

LANES = 1
"""Streams that products take in turn, 1 or 2, so that the next one begins while the one before
leaves: a second one has gained nothing for sure (decision 0011, point 14)."""

IDLE_SPIN_SECONDS = 100e-6
"""How long the dispatcher's thread looks for more before it sleeps, where it may spin at all: being
woken takes it some 10 to 50 microseconds."""


class DirectEngine:
    """The dispatcher on one GPU.

    Args:
        engine: computes what the dispatcher leaves to it.
        streams: the device of that engine.
        layers: all of them, in the order of their numbers.
        slab: where activations lie.
        limits: of the dispatcher's queue.
        most_running: batches that may be with the GPU at a time.
        spare: multiprocessors that products leave to the kernels that move rows of other batches,
            which otherwise wait for the end of one; None: as suits the device. All products do,
            whatever runs beside them, as the same batch has the same bits.
        row_blocks: of those kernels, both together, of batches that are not alone, so that they
            stay on these multiprocessors; 0: as many as they take; None: one for each that
            products leave.
        timed_each: of so many batches of a layer that are not alone one is timed; None: TIMED_EACH.
        copied_row_bytes: rows of results so long go out by the copy engine, if its driver takes
            many copies in one call; 0: none do; None: COPIED_ROW_BYTES.
        lanes: streams for products, 1 or 2; None: LANES. One in batch-invariant mode.
        spinning: threads that keep a core busy while batches run, 1 or 2, where there are cores
            enough.

    Raises:
        BuildError: the library has no dispatcher.
        RuntimeError: the device has no room for the buffers, or there is no thread.
    """

    def __init__(
        self,
        *,
        engine: GpuEngine,
        streams: CudaStreams,
        layers: Sequence[QuantizedLinear],
        slab: Slab,
        limits: QueueLimits,
        most_running: int,
        spare: int | None = None,
        row_blocks: int | None = None,
        spinning: int = SPINNING,
        timed_each: int | None = None,
        copied_row_bytes: int | None = None,
        lanes: int | None = None,
    ) -> None:
        self._engine, self._streams = engine, streams
        left = _spare_of(streams.kernels, spare)
        streams.kernels.leave(left)
        self._row_blocks = left if row_blocks is None else row_blocks
        self._spinning = spinning if streams.spins else 0
        self._timed_each = TIMED_EACH if timed_each is None else timed_each
        self._copied_row_bytes = COPIED_ROW_BYTES if copied_row_bytes is None else copied_row_bytes
        self._lanes = 1 if streams.kernels.batch_invariant else LANES if lanes is None else lanes
        self._recovery: WorkerThread | None = None
        self._direct = {
            layer.spec.name: layer
            for layer in layers
            if engine.sees_slab and streams.can_gather(layer)
        }
        self._forms: dict[Any, int] = {}
        self._taught: set[tuple[int, DType, DType, int]] = set()
        self._room = Room(streams, list(self._direct.values()))
        options = self._options(layers, limits, slab, most_running)
        self.native = NativeDispatch(streams.kernels.library, options)
        self._teach_small(layers)

    async def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part of a batch that was left to the engine."""
        return await self._engine.run(batch)

    def learn(self, batch: Batch) -> None:
        """Teach the dispatcher how to send batches like this one, if it can."""
        key, layer = batch.key, self._direct.get(batch.key.layer)
        if layer is None or batch.rows > TABLE_ROWS:
            return
        if all(part.rows == part.item.rows for part in batch.parts):
            self._teach(layer, key.x_dtype, key.output_dtype, batch.rows)

    async def recover(self, error: BaseException) -> None:
        """Make the GPU fit for more after a batch of the dispatcher has failed.

        Raises:
            EngineLost: it is gone.
        """
        if self._recovery is None:
            self._recovery = WorkerThread("gpu recovery")
        told = await self._recovery.run(self._streams.recovered, error)
        if isinstance(told, EngineLost):
            raise told

    def kernel_nanoseconds(self, measured: int) -> int:
        """Return what a product took, without the cost of the events around it."""
        return max(measured - self._streams.pair_nanoseconds, SHORTEST_NANOSECONDS)

    def stop(self, timeout_seconds: float) -> bool:
        """End all threads; return whether they have ended in time."""
        if not self.native.stop(timeout_seconds):
            return False
        self.native.close()
        ended = self._engine.stop(timeout_seconds)
        return (self._recovery is None or self._recovery.stop(timeout_seconds)) and ended

    def _options(
        self,
        layers: Sequence[QuantizedLinear],
        limits: QueueLimits,
        slab: Slab,
        most_running: int,
    ) -> DispatchOptions:
        streams = self._streams
        kernels, (into, compute, out) = streams.kernels, streams.in_order
        options = DispatchOptions(queue=limits)
        options.layers = (DispatchLayer * len(layers))(*map(self._layer, layers))
        stages = (self._room.stage() for _ in range(most_running))
        options.stages = (DispatchStage * most_running)(*stages)
        options.stages_count = options.most_running = most_running
        options.most_chained = self._engine.most_chained
        options.table_rows, options.row_blocks = TABLE_ROWS, self._row_blocks
        options.timed_each = self._timed_each
        if kernels.library.ql_cuda_copies_parts(kernels.runtime.ordinal):
            options.copied_row_bytes = self._copied_row_bytes
        options.spins, options.starts_lone = self._spinning, True
        options.idle_spin_seconds = IDLE_SPIN_SECONDS
        options.slab, options.slot_unit_bytes = slab.address, SMALLEST_SLOT_BYTES
        options.in_stream, options.out_stream = into.cuda_stream, out.cuda_stream
        with kernels.runtime.on(compute):
            options.launch = kernels.runtime.launch(compute, "dispatch")
        if self._lanes > 1:
            second = streams.second_lane()
            with kernels.runtime.on(second):
                options.second = kernels.runtime.launch(second, "dispatch")
        library = kernels.library
        options.run, options.wait, options.error_text = (
            ctypes.cast(getattr(library, f"ql_cuda_{name}"), ctypes.c_void_p)
            for name in ("run_batch", "wait_batch", "error_text")
        )
        return options

    def _layer(self, layer: QuantizedLinear) -> DispatchLayer:
        if layer.spec.name not in self._direct:
            return DispatchLayer(is_direct=0)
        kernels = self._streams.kernels
        params = LinearParams.from_buffer_copy(kernels.known.of(layer, kernels.device).params)
        permutation = layer.k_permutation
        return DispatchLayer(
            product=params,
            permutation=None if permutation is None else permutation.data_ptr(),
            form=self._form(layer),
            is_direct=1,
        )

    def _form(self, layer: QuantizedLinear) -> int:
        """Return the number of all layers whose products are cut alike."""
        kernels = self._streams.kernels
        params = kernels.known.of(layer, kernels.device).params
        key = (
            *(params.n, params.k, params.group_size, params.bits),
            *(params.compute_dtype, params.scale_dtype, params.bias_dtype),
            *(params.zeros is None, params.bias is None),
        )
        return self._forms.setdefault(key, len(self._forms))

    def _teach_small(self, layers: Sequence[QuantizedLinear]) -> None:
        for layer in layers:
            if layer.spec.name in self._direct:
                dtype = layer.spec.compute_dtype
                for rows in range(1, TAUGHT_ROWS + 1):
                    self._teach(layer, dtype, dtype, rows)

    def teach(self, layer: QuantizedLinear, x_dtype: DType, y_dtype: DType) -> None:
        """Teach the dispatcher all batches of a layer and two dtypes."""
        for rows in range(1, TABLE_ROWS + 1):
            self._teach(layer, x_dtype, y_dtype, rows)

    def _teach(self, layer: QuantizedLinear, x_dtype: DType, y_dtype: DType, rows: int) -> None:
        form = self._form(layer)
        key = form, x_dtype, y_dtype, rows
        if key in self._taught:
            return
        self._taught.add(key)
        multiplied = layer.spec.compute_dtype if x_dtype is DType.F32 else x_dtype
        plan = self._streams.kernels.plan(layer, rows, multiplied, y_dtype)
        self.native.plan(form, x_dtype, y_dtype, rows, plan)


def _spare_of(kernels: CudaKernels, asked: int | None) -> int:
    """Return how many multiprocessors products leave alone."""
    if kernels.batch_invariant:
        return 0
    if asked is None:
        return SPARE if kernels.info.sm_count >= LEAST_TO_SPARE else 0
    return asked
