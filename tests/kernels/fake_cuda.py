"""`CudaKernels` over a library that only pretends to have a GPU: tests/csrc/fake_*.cpp.

Tensors live in host memory and streams are numbers; everything else is the real thing.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qlinear_service.gpu import probe, streams
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels import build, cuda_runtime
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.cuda_runtime import CudaRuntime

SOURCES = [
    *(Path(__file__).parents[1] / "csrc" / name for name in ("fake_cuda.cpp", "fake_rows.cpp")),
    *sorted(build.SOURCE_ROOT.glob("dispatch/*.cpp")),
]


class HostStream:
    """A stream that has always finished."""

    made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        HostStream.made += 1
        self.cuda_stream = HostStream.made
        self.fault: RuntimeError | None = None

    def synchronize(self) -> None:
        if self.fault is not None:
            raise self.fault

    def wait_stream(self, other: "HostStream") -> None:
        pass


class HostEvent:
    """An event that torch makes at its first record."""

    made = 0

    def __init__(self) -> None:
        self.cuda_event = 0

    def record(self, stream: HostStream) -> None:
        if not self.cuda_event:
            HostEvent.made += 1
            self.cuda_event = HostEvent.made


class HostCuda:
    """What cuda_runtime.py asks of torch.cuda."""

    Event = HostEvent
    Stream = HostStream

    def __init__(self) -> None:
        self.streams = [HostStream()]
        self.capturing = False

    def is_available(self) -> bool:
        return True

    def current_stream(self, device: object) -> HostStream:
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: HostStream) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class HostRuntime(CudaRuntime):
    """The runtime with host memory."""

    @staticmethod
    def torch_device(ordinal: int) -> torch.device:
        return torch.device("cpu")


class HostKernels(CudaKernels):
    """The kernels with host memory."""

    runtime_class = HostRuntime


def pretend(patch: pytest.MonkeyPatch) -> HostCuda:
    """Let cuda_runtime.py see a torch.cuda that has streams and no GPU."""
    host = HostCuda()
    real = cuda_runtime.torch

    class Torch:
        cuda = host

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    patch.setattr(cuda_runtime, "torch", Torch())
    return host


class Event(HostEvent):
    """An event at a time that it is told."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.options = options
        self.milliseconds = 0.0

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, after: "Event") -> float:
        return after.milliseconds - self.milliseconds

    def query(self) -> bool:
        return True


class Stream(HostStream):
    """A stream that remembers for what it was told to wait."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        super().__init__(device)
        self.priority = priority
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


def pretend_streams(patch: pytest.MonkeyPatch) -> None:
    """Let streams.py and probe.py, too, see such a torch.cuda, and memory that nobody pins."""
    host = pretend(patch)
    cuda = SimpleNamespace(
        Event=Event, Stream=Stream, stream=host.stream, current_stream=host.current_stream
    )
    real = torch

    class Torch:
        def __getattr__(self, name: str) -> object:
            return cuda if name == "cuda" else getattr(real, name)

    for module in (streams, probe):
        patch.setattr(module, "torch", Torch())
    patch.setattr(probe, "BUSY_BYTES", 4096)
    patch.setattr(
        CudaStreams, "host_memory", lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8)
    )


def build_fake(folder: Path) -> Path:
    """Compile the library, linked with the CPU one, and return its path."""
    cpu = build.build_cpu_library(build.default_cache_dir())
    built = folder / "libfake_cuda.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread"]
    linked = [str(cpu), f"-Wl,-rpath,{cpu.parent}"]
    command = [
        "g++",
        *flags,
        f"-I{build.SOURCE_ROOT}",
        *map(str, SOURCES),
        *linked,
        "-o",
        str(built),
    ]
    subprocess.run(command, check=True)
    return built
