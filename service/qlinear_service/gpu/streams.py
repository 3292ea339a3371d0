"""One GPU as the engine uses it: three streams side by side, and events between them.

Copies to the device, products and copies back each have a stream, so that those of different
batches overlap; what belongs to one batch is held in order by events. The native dispatcher may
have a second stream for products. Every call but `wait` and `settle` returns before the GPU has
done it. Never waits for the whole device.
"""

import os
from typing import Any, NamedTuple, Protocol

import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineLost
from qlinear_service.gpu.express import Course, Express, Trip
from qlinear_service.gpu.probe import pair_seconds
from qlinear_service.gpu.stages import Stage, copied
from qlinear_service.kernels import unquantized
from qlinear_service.kernels.cuda import CudaKernels, DeviceLost
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear

__all__ = ["CudaStreams", "Device", "Marks", "Times"]

SHORTEST_NANOSECONDS = 500
"""What events can tell apart. A kernel that came out shorter after the cost of the pair was taken
off has the cost to thank, not its speed."""

ITEM_BYTES = 2
"""Of activations in the order of codes: fp32 is rounded on the way."""

CORES_TO_SPIN = 4
"""With so many cores the thread that waits for a batch may keep one busy: it notices the end some
20 microseconds sooner than one that is woken up."""


class Times(NamedTuple):
    """What one batch took on the device, each in nanoseconds."""

    to_device: int
    kernel: int
    from_device: int
    kernels: tuple[tuple[str, int], ...] = ()
    """Where several devices took part: the name of each, and what its kernel took."""


class Device(Protocol):
    """What the engine asks of a device; tests have one that is made of threads.

    `marks` are the events of one batch in flight, used again by the next one in its place.
    """

    scatters: bool
    """Whether results may be written over the activations that they were made of."""
    chains: bool
    """Whether a trip may have several layers."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] of host memory that the device can copy from and to."""

    def new_stage(self) -> Stage:
        """Return the buffers and events of one batch in flight, without room for anything yet."""

    def admit(self, address: int, nbytes: int) -> str:
        """Let kernels into host memory until `dismiss`; return why it cannot be, "" if it is so."""

    def dismiss(self, address: int) -> None:
        """Shut kernels out of what they were let into; nothing uses it any more."""

    def can_gather(self, layer: QuantizedLinear) -> bool:
        """Say whether rows of x for `layer` can be gathered by a kernel."""

    def submit(self, trip: Trip) -> None:
        """Put a whole batch on its way; without a gather its rows are in the stage already.

        Raises:
            RuntimeError: a step could not be launched; results were written nowhere.
        """

    def wait(self, marks: Any, seconds: float | None = None) -> bool:
        """Wait until results are on the host; other threads run on meanwhile.

        Returns False if they are not after so many seconds; None waits for as long as it takes.
        """

    def times(self, marks: Any) -> Times:
        """Return what a batch took that has been waited for."""

    def results(self, stage: Stage, layer: QuantizedLinear, rows: int, dtype: DType) -> memoryview:
        """Return a copy of y [rows, n] that a batch has left in its stage, as bytes."""

    def settle(self) -> None:
        """Wait until nothing that was asked for touches memory any more."""

    def explained(self, error: BaseException) -> BaseException:
        """Return what to tell of an error: EngineLost if the device is gone, else itself."""


class Marks:
    """Events before and after each of the three steps of a batch."""

    __slots__ = ("course", "in_start", "in_stop", "kernel", "out_start", "out_stop")

    def __init__(self, *, blocking: bool) -> None:
        self.in_start, self.in_stop, first, second, self.out_start = (_event() for _ in range(5))
        self.kernel = (first, second)
        self.out_stop = _event(blocking=blocking)
        self.course = Course()


class CudaStreams:
    """A real GPU.

    Args:
        kernels: on that GPU.
        urgent_rows: kernels that move rows go before products that have not begun.
    """

    scatters = chains = True

    def __init__(self, kernels: CudaKernels, *, urgent_rows: bool = False) -> None:
        self.kernels = kernels
        self.device = kernels.device
        self._in, self._compute, self._out = (
            _stream(self.device, priority=-1 if urgent_rows and is_rows else 0)
            for is_rows in (True, False, True)
        )
        self.in_order = (self._in, self._compute, self._out)
        """The streams for rows in, products and rows out."""
        self._second: torch.cuda.Stream | None = None
        self._second_done = self.new_event(blocks=False)
        kernels.prepare(self._compute)
        self._express = Express(kernels, self.in_order)
        self.pair_nanoseconds = round(pair_seconds(kernels, self._in, self._compute) * 1e9)
        """What a pair of events measures beyond the product between them."""
        self.spins = len(os.sched_getaffinity(0)) >= CORES_TO_SPIN
        """Threads that wait for a batch may keep a core busy."""

    def second_lane(self) -> torch.cuda.Stream:
        """Return a second stream for products, with a workspace of its own.

        Batches that come by here wait for what was launched there; while they run, nothing may be.
        """
        if self._second is None:
            self._second = _stream(self.device, priority=0)
            self.kernels.prepare(self._second)
        return self._second

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def new_stage(self) -> Stage:
        """Return a stage of this GPU."""
        return Stage(self)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory of the GPU; whoever lets go of it has waited for all that used it."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def new_marks(self) -> Marks:
        """Return the events of one batch in flight."""
        return Marks(blocking=not self.spins)

    def new_event(self, *, blocks: bool) -> torch.cuda.Event:
        """Return an event that keeps order and takes no time."""
        return _event(blocking=blocks, timed=False)

    def copy_in(self, host: torch.Tensor, device: torch.Tensor, marks: Marks) -> None:
        """Copy to the GPU on the stream for that."""
        marks.course.batch = None
        with torch.cuda.stream(self._in):
            marks.in_start.record(self._in)
            device.copy_(host, non_blocking=True)
            marks.in_stop.record(self._in)

    def multiply(
        self, layer: QuantizedLinear, x: torch.Tensor, y: torch.Tensor, dtype: DType, marks: Marks
    ) -> None:
        """Launch the product; its events are recorded by the same call of the library."""
        self._compute.wait_event(marks.in_stop)
        if not layer.spec.quantized:
            with torch.cuda.stream(self._compute):
                marks.kernel[0].record(self._compute)
                unquantized.fill(layer, x, y, row_by_row=self.kernels.batch_invariant)
                marks.kernel[1].record(self._compute)
            return
        self.kernels.linear(layer, x, dtype, out=y, stream=self._compute, events=marks.kernel)

    def copy_out(self, device: torch.Tensor, host: torch.Tensor, marks: Marks) -> None:
        """Copy from the GPU on the stream for that."""
        self._out.wait_event(marks.kernel[1])
        with torch.cuda.stream(self._out):
            marks.out_start.record(self._out)
            host.copy_(device, non_blocking=True)
            marks.out_stop.record(self._out)

    def admit(self, address: int, nbytes: int) -> str:
        """Register host memory with CUDA; its pages stay where they are from now on."""
        library, ordinal = self.kernels.library, self.kernels.runtime.ordinal
        try:
            status = library.ql_cuda_register(address, nbytes, ordinal)
            self.kernels.runtime.check(status, f"registering {nbytes} bytes of host memory")
        except RuntimeError as error:
            return str(error)
        return ""

    def dismiss(self, address: int) -> None:
        """Unregister host memory; a device that is lost has let go of it."""
        self.kernels.library.ql_cuda_unregister(address, self.kernels.runtime.ordinal)

    def can_gather(self, layer: QuantizedLinear) -> bool:
        """Say whether a permuted row has room in shared memory, where it is brought into order."""
        spec = layer.spec
        room = self.kernels.info.shared_bytes_per_block
        return spec.quantized and (layer.k_permutation is None or spec.k * ITEM_BYTES <= room)

    def submit(self, trip: Trip) -> None:
        """Put a batch on its way: by one call of the library, or step by step where that cannot."""
        if self._second is not None:
            self._second_done.record(self._second)
            self._compute.wait_event(self._second_done)
        if self._express.takes(trip.layer, trip.way):
            self._express.run(trip)
            return
        assert not any((*trip.way, trip.more)), "only one call can reach rows, or chain layers"
        stage, spec = trip.stage, trip.layer.spec
        x_bytes = trip.rows * spec.k * trip.x_dtype.itemsize
        y_bytes = trip.rows * spec.n * trip.y_dtype.itemsize
        x, y = stage.x.device[:x_bytes], stage.y.device[:y_bytes]
        x_rows = x.view(to_torch(trip.x_dtype)).view(trip.rows, spec.k)
        y_rows = y.view(to_torch(trip.y_dtype)).view(trip.rows, spec.n)
        self.copy_in(stage.x.host[:x_bytes], x, stage.marks)
        self.multiply(trip.layer, x_rows, y_rows, trip.y_dtype, stage.marks)
        self.copy_out(y, stage.y.host[:y_bytes], stage.marks)

    def wait(self, marks: Marks, seconds: float | None = None) -> bool:
        """Wait for the last event of a batch, without the interpreter lock."""
        if marks.course.batch is not None:
            return self._express.wait(marks.course, -1 if seconds is None else int(1e9 * seconds))
        if seconds is not None:
            return False  # what goes step by step is nothing to wait for beside other work
        marks.out_stop.synchronize()
        return True

    def times(self, marks: Marks) -> Times:
        """Return the times between events; of the product without the cost of the pair."""
        if marks.course.batch is not None:
            into, kernel, out = marks.course.took
            return Times(into, max(kernel - self.pair_nanoseconds, SHORTEST_NANOSECONDS), out)
        kernel = _nanoseconds(*marks.kernel) - self.pair_nanoseconds
        return Times(
            to_device=_nanoseconds(marks.in_start, marks.in_stop),
            kernel=max(kernel, SHORTEST_NANOSECONDS),
            from_device=_nanoseconds(marks.out_start, marks.out_stop),
        )

    def results(self, stage: Stage, layer: QuantizedLinear, rows: int, dtype: DType) -> memoryview:
        """Return a copy of what lies in the stage."""
        return copied(stage.y.host[: rows * layer.spec.n * dtype.itemsize])

    def settle(self) -> None:
        """Wait for all streams."""
        for stream in (*self.in_order, *self._lanes()[1:]):
            stream.synchronize()

    def recovered(self, error: BaseException) -> BaseException:
        """Make the GPU fit for more after a failed launch; return what to tell of the error."""
        told = self.explained(error)
        if not isinstance(told, EngineLost):
            self.settle()
            for stream in self._lanes():
                self.kernels.runtime.clear_workspace(stream)
        return told

    def _lanes(self) -> tuple[torch.cuda.Stream, ...]:
        """Return the streams for products."""
        return (self._compute,) if self._second is None else (self._compute, self._second)

    def explained(self, error: BaseException) -> BaseException:
        """Return EngineLost for an error after which the GPU does not even run an empty kernel."""
        lost = isinstance(error, DeviceLost) or (
            isinstance(error, RuntimeError)
            and not isinstance(error, torch.OutOfMemoryError)
            and self.kernels.runtime.is_lost()
        )
        return EngineLost(f"{self.device} is lost: {error}") if lost else error


def _stream(device: torch.device, *, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def _event(*, blocking: bool = False, timed: bool = True) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed, blocking=blocking)  # type: ignore[no-untyped-call]


def _nanoseconds(before: torch.cuda.Event, after: torch.cuda.Event) -> int:
    return int(1e6 * before.elapsed_time(after))
