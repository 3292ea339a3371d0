"""A device made of three threads, one for each stream, with the interface of the real one.

What passes between them is real memory, so that a slot or a stage that is given back too early
shows in the results. Every step can be held, broken and watched.
"""

import ctypes
import queue
import threading
from collections.abc import Callable

import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineLost
from qlinear_service.gpu.express import Trip
from qlinear_service.gpu.stages import Stage, copied, places_of
from qlinear_service.gpu.streams import Times
from qlinear_service.kernels import reference
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear

WAIT_SECONDS = 5.0
STEPS = ("copy_in", "kernel", "copy_out")


Linear = Callable[[QuantizedLinear, torch.Tensor, DType], torch.Tensor]


def reference_linear(layer: QuantizedLinear, x: torch.Tensor, dtype: DType) -> torch.Tensor:
    return reference.linear(layer, x, output_dtype=dtype)


class Marks:
    """Whether each step of a batch has ended, and what went wrong in one."""

    def __init__(self) -> None:
        self.ended = {step: threading.Event() for step in STEPS}
        self.error: BaseException | None = None


class Lost(RuntimeError):
    """What this device raises for everything once it is lost."""


class FakeGpu:
    """Three streams; a step runs when its gate is open.

    Args:
        linear: multiplies; the reference unless told otherwise.
    """

    scatters = chains = True

    def __init__(self, linear: Linear = reference_linear) -> None:
        self.linear = linear
        self.gates = {step: threading.Event() for step in STEPS}
        self.log: list[str] = []
        """Each step as it begins, "kernel begins", and as it ends, "kernel"."""
        self.allocated: list[int] = []
        """Bytes of each piece of device memory that was handed out."""
        self.memory_bytes = 1 << 40
        self.lost = False
        self.keeps_out = ""
        """Why no memory of the host can be registered; "" if it can."""
        self.admitted = (0, 0)
        """Address and bytes of the memory that kernels were let into."""
        self.host_pieces: list[torch.Tensor] = []
        self.breaks_scatter = False
        self.trips: list[Trip] = []
        self.refuses: Callable[[int], str] = lambda rows: ""
        """Says why a product of so many rows cannot be launched; "" if it can."""
        self.faults: Callable[[torch.Tensor], str] = lambda x: ""
        """Says what goes wrong while x is multiplied; "" if nothing does."""
        self._entered = threading.Condition()
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None]]] = {}
        for step in STEPS:
            self.gates[step].set()
            self._queues[step] = queue.SimpleQueue()
            threading.Thread(target=self._stream, args=(step,), daemon=True).start()

    def _stream(self, step: str) -> None:
        jobs = self._queues[step]
        while True:
            jobs.get()()

    def _run(self, step: str, marks: Marks, after: str, work: Callable[[], None]) -> None:
        marks.ended[step].clear()

        def job() -> None:
            if after:
                assert marks.ended[after].wait(WAIT_SECONDS)
            with self._entered:
                self.log.append(f"{step} begins")
                self._entered.notify_all()
            assert self.gates[step].wait(WAIT_SECONDS), "the test forgot to open the gate"
            try:
                work()
            except BaseException as error:
                marks.error = error
            with self._entered:
                self.log.append(step)
                self._entered.notify_all()
            marks.ended[step].set()

        self._queues[step].put(job)

    def until(self, step: str, count: int) -> None:
        """Wait until a step has been logged so often: "kernel begins", "copy_out" and so on."""
        with self._entered:
            assert self._entered.wait_for(lambda: self.count(step) >= count, WAIT_SECONDS)

    def count(self, step: str) -> int:
        return self.log.count(step)

    def _alive(self) -> None:
        if self.lost:
            raise Lost("an illegal memory access was encountered")

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self.host_pieces.append(torch.full((nbytes,), 0xEE, dtype=torch.uint8))
        return self.host_pieces[-1]

    def device_memory(self, nbytes: int) -> torch.Tensor:
        self._alive()
        if sum(self.allocated) + nbytes > self.memory_bytes:
            raise torch.OutOfMemoryError(f"out of memory: {nbytes} bytes")
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 0xDD, dtype=torch.uint8)

    def new_marks(self) -> Marks:
        return Marks()

    def new_stage(self) -> Stage:
        return Stage(self)

    def results(self, stage: Stage, layer: QuantizedLinear, rows: int, dtype: DType) -> memoryview:
        return copied(stage.y.host[: rows * layer.spec.n * dtype.itemsize])

    def admit(self, address: int, nbytes: int) -> str:
        if not self.keeps_out:
            self.admitted = (address, nbytes)
        return self.keeps_out

    def dismiss(self, address: int) -> None:
        assert address == self.admitted[0]
        self.admitted = (0, 0)

    def can_gather(self, layer: QuantizedLinear) -> bool:
        return layer.spec.quantized

    def submit(self, trip: Trip) -> None:
        """Rows are moved by the same threads as copies, and over the very memory of the slab."""
        self.trips.append(trip)
        stage, spec = trip.stage, trip.layer.spec
        x_bytes = trip.rows * spec.k * trip.x_dtype.itemsize
        y_bytes = trip.rows * spec.n * trip.y_dtype.itemsize
        x, y = stage.x.device[:x_bytes], stage.y.device[:y_bytes]
        if trip.way.gather:
            assert self._sees(trip), "a kernel read memory that it was not let into"
            self._gather(trip, x, stage.marks)
        else:
            self.copy_in(stage.x.host[:x_bytes], x, stage.marks)
        x_rows = x.view(to_torch(trip.x_dtype)).view(trip.rows, spec.k)
        if trip.more:
            self._multiply_all(trip, x_rows)
            return
        y_rows = y.view(to_torch(trip.y_dtype)).view(trip.rows, spec.n)
        self.multiply(trip.layer, x_rows, y_rows, trip.y_dtype, stage.marks)
        if trip.way.scatter:
            assert self._sees(trip), "a kernel wrote memory that it was not let into"
            self._scatter(trip, y, stage.marks)
        else:
            self.copy_out(y, stage.y.host[:y_bytes], stage.marks)

    def _multiply_all(self, trip: Trip, x: torch.Tensor) -> None:
        """One product after the other in one step, and all results out in one copy."""
        assert trip.way.gather
        assert not trip.way.scatter, "the other layers read it"
        self._alive()
        problem = self.refuses(len(x))
        if problem:
            raise RuntimeError(problem)
        stage, rows = trip.stage, trip.rows
        sizes = [rows * layer.spec.n * y_dtype.itemsize for layer, y_dtype in trip.products]
        begins = places_of(sizes)

        def work() -> None:
            fault = self.faults(x)
            if fault:
                raise RuntimeError(fault)
            for (layer, y_dtype), begin, size in zip(trip.products, begins, sizes, strict=True):
                y = stage.y.device[begin : begin + size].view(to_torch(y_dtype)).view(rows, -1)
                y.copy_(self.linear(layer, x, y_dtype))

        self._run("kernel", stage.marks, "copy_in", work)
        end = begins[-1] + sizes[-1]
        self.copy_out(stage.y.device[:end], stage.y.host[:end], stage.marks)

    def _sees(self, trip: Trip) -> bool:
        ranges = [self.admitted, *((t.data_ptr(), len(t)) for t in self.host_pieces)]
        return all(
            any(begin <= address < begin + nbytes for begin, nbytes in ranges)
            for address in trip.parts[::2]
        )

    def _gather(self, trip: Trip, x: torch.Tensor, marks: Marks) -> None:
        self._alive()
        marks.error = None
        parts, row_bytes = trip.parts, len(x) // trip.rows

        def work() -> None:
            end = 0
            for address, rows in zip(parts[::2], parts[1::2], strict=True):
                begin, end = end, end + rows * row_bytes
                ctypes.memmove(x.data_ptr() + begin, address, end - begin)

        self._run("copy_in", marks, "", work)

    def _scatter(self, trip: Trip, y: torch.Tensor, marks: Marks) -> None:
        self._alive()
        parts, row_bytes = trip.parts, len(y) // trip.rows

        def work() -> None:
            if self.breaks_scatter:
                raise RuntimeError("half of it was written")
            end = 0
            for address, rows in zip(parts[::2], parts[1::2], strict=True):
                begin, end = end, end + rows * row_bytes
                ctypes.memmove(address, y.data_ptr() + begin, end - begin)

        self._run("copy_out", marks, "kernel", work)

    def copy_in(self, host: torch.Tensor, device: torch.Tensor, marks: Marks) -> None:
        self._alive()
        marks.error = None
        self._run("copy_in", marks, "", lambda: device.copy_(host))

    def multiply(
        self, layer: QuantizedLinear, x: torch.Tensor, y: torch.Tensor, dtype: DType, marks: Marks
    ) -> None:
        self._alive()
        problem = self.refuses(len(x))
        if problem:
            raise RuntimeError(problem)

        def work() -> None:
            fault = self.faults(x)
            if fault:
                raise RuntimeError(fault)
            y.copy_(self.linear(layer, x, dtype))

        self._run("kernel", marks, "copy_in", work)

    def copy_out(self, device: torch.Tensor, host: torch.Tensor, marks: Marks) -> None:
        self._alive()
        self._run("copy_out", marks, "kernel", lambda: host.copy_(device))

    def wait(self, marks: Marks, seconds: float | None = None) -> bool:
        if not marks.ended["copy_out"].wait(WAIT_SECONDS if seconds is None else seconds):
            assert seconds is not None, "a batch does not end"
            return False
        self._alive()
        if marks.error is not None:
            raise marks.error
        return True

    def times(self, marks: Marks) -> Times:
        return Times(to_device=1000, kernel=5000, from_device=2000)

    def settle(self) -> None:
        for step in STEPS:
            done = threading.Event()
            self._queues[step].put(done.set)
            assert done.wait(WAIT_SECONDS)
        self._alive()

    def explained(self, error: BaseException) -> BaseException:
        return EngineLost(str(error)) if self.lost else error


def open_gates(gpu: FakeGpu) -> None:
    for gate in gpu.gates.values():
        gate.set()
