"""One GPU and its streams: the loaded library, a workspace for each stream, and what went wrong.

Knows tensors as memory only; what is multiplied is the business of cuda.py.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from qlinear_service.errors import BuildError
from qlinear_service.kernels import cuda_abi
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaFlag, CudaLaunch, CudaPlan, Status

__all__ = ["CudaRuntime", "DeviceLost", "Events", "load_library", "named", "usable_device"]

Events = tuple[torch.cuda.Event, torch.cuda.Event]
"""Recorded right before and right after a product, both made with enable_timing=True."""


class DeviceLost(RuntimeError):
    """The GPU fails whatever is asked of it from now on; only a new process gets it back."""


def load_library(path: Path) -> ctypes.CDLL:
    """Return the library with its functions declared; needs no GPU.

    Raises:
        BuildError: the file is no fitting library.
    """
    try:
        library = cuda_abi.declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load the CUDA kernels {path}: {error}") from error
    found, expected = cuda_abi.sizes(library), cuda_abi.expected_sizes()
    if found != expected:
        raise BuildError(
            f"{path} has layout version and struct sizes {found}, expected {expected}; "
            "delete it and start again, it will be rebuilt"
        )
    return library


def usable_device(library: ctypes.CDLL, ordinal: int) -> CudaDevice:
    """Return what the library knows of a GPU that it can serve.

    Raises:
        BuildError: there is no such GPU, the library has no kernels for it, or torch cannot use it.
    """
    info = CudaDevice()
    status = library.ql_cuda_device_info(ordinal, info)
    if status != Status.OK:
        raise BuildError(
            f"CUDA device {ordinal} cannot be used: {library.ql_cuda_error_text().decode()}; "
            "run nvidia-smi to see which there are, or serve with --device cpu"
        )
    if not info.supported:
        raise BuildError(
            f"{named(info)} is not supported: the CUDA kernels hold machine code for sm_"
            f"{library.ql_cuda_architectures().decode().replace(' ', ', sm_')}; "
            "serve with --device cpu"
        )
    if not torch.cuda.is_available():
        raise BuildError(
            f"torch {torch.__version__} cannot use {named(info)}: install a build of torch for "
            "CUDA, or serve with --device cpu"
        )
    return info


def named(info: CudaDevice) -> str:
    """Return a GPU's name and architecture as people know them."""
    return f"{info.name.decode(errors='replace')} (sm_{info.major}{info.minor})"


class CudaRuntime:
    """The library on one device, and the launch struct of each stream.

    Args:
        library_path: the built library.
        device: CUDA ordinal.
        flags: of every launch.
        spare_workspaces: how many streams may begin with a graph capture, where none can be made.

    Raises:
        BuildError: the file is no fitting library, or it cannot serve that GPU.
    """

    def __init__(
        self, library_path: Path, *, device: int, flags: CudaFlag, spare_workspaces: int
    ) -> None:
        self.library = load_library(library_path)
        self.info = usable_device(self.library, device)
        self.device = self.torch_device(device)
        self.ordinal = device
        self.flags = flags
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[CudaLaunch, torch.Tensor]] = {}
        self.probe_stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        """For what is measured and asked beside the work."""
        if self.is_lost():
            raise BuildError(f"{named(self.info)} cannot run an empty kernel: {self._last_error()}")
        self._spares = [self._new_workspace() for _ in range(spare_workspaces)]
        torch.cuda.current_stream(self.device).synchronize()

    @staticmethod
    def torch_device(ordinal: int) -> torch.device:
        """Return where the tensors of a GPU live."""
        return torch.device("cuda", ordinal)

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[torch.cuda.Stream]:
        """Make `stream` torch's current one, so that what is allocated meanwhile belongs to it.

        Yields it, or the current one for None.
        """
        current = torch.cuda.current_stream(self.device)
        if stream is None or stream == current:
            yield current
        else:
            with torch.cuda.stream(stream):
                yield stream

    def launch(
        self,
        stream: torch.cuda.Stream,
        operation: str,
        events: Events | None = None,
        plan: CudaPlan | None = None,
    ) -> CudaLaunch:
        """Return the launch struct of the current stream; its workspace is made at first use.

        Only one with events or a plan, which must outlive it, may be changed.
        """
        handle = stream.cuda_stream
        found = self._streams.get(handle)
        if found is None:
            with self._lock:
                found = self._streams.get(handle) or self._first_launch(handle, operation)
        if events is None and plan is None:
            return found[0]
        launch = CudaLaunch.from_buffer_copy(found[0])
        if plan is not None:
            launch.plan = ctypes.pointer(plan)
        if events is not None:
            for event in events:
                if not event.cuda_event:  # torch makes them at their first record
                    event.record(stream)
            launch.start_event, launch.stop_event = (event.cuda_event for event in events)
        return launch

    def _first_launch(self, handle: int, operation: str) -> tuple[CudaLaunch, torch.Tensor]:
        if self._spares:
            workspace = self._spares.pop()
        elif torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{operation} on {self.device}: the stream has no workspace, and none can be made "
                "while it captures; call prepare(stream) before"
            )
        else:
            workspace = self._new_workspace()
        launch = CudaLaunch(
            device=self.ordinal,
            flags=self.flags,
            stream=handle,
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
        )
        self._streams[handle] = launch, workspace
        return launch, workspace

    def _new_workspace(self) -> torch.Tensor:
        """Return zeroed memory for one stream; the zeros are written on the current one."""
        nbytes = self.library.ql_cuda_workspace_bytes()
        return self.allocate((nbytes,), torch.uint8, "workspace").zero_()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, operation: str) -> torch.Tensor:
        """Return uninitialized memory of the current stream.

        Raises:
            RuntimeError: there is none; DeviceLost if that is because the device is gone.
        """
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            raise self.error(operation, f"allocating {list(shape)} {dtype}: {error}") from error

    def check(self, status: int, operation: str, stream: torch.cuda.Stream | None = None) -> None:
        """Do nothing for QL_OK.

        Args:
            status: what the library returned.
            operation: what it was asked to do.
            stream: whose workspace it was given, if any.

        Raises:
            RuntimeError: the call failed, with operation and reason.
            DeviceLost: every further call will.
        """
        if status == Status.OK:
            return
        text = self.library.ql_status_text(status).decode()
        if status in (Status.CUDA_ERROR, Status.BAD_PLAN):
            text = self._last_error()
        error = self.error(operation, f"{text} (status {status})", lost=status == Status.CUDA_ERROR)
        if stream is not None and not isinstance(error, DeviceLost):
            self.clear_workspace(stream)
        raise error

    def clear_workspace(self, stream: torch.cuda.Stream) -> None:
        """Set a stream's workspace to zero, as the header asks for after a failed launch.

        In place: captured graphs may hold its address. In turn: the launch before may still be
        counting there.
        """
        with self.on(stream):
            self._streams[stream.cuda_stream][1].zero_()

    def error(self, operation: str, text: str, *, lost: bool = True) -> RuntimeError:
        """Return the error to raise; `lost` says whether the device could be gone."""
        kind = DeviceLost if lost and self.is_lost() else RuntimeError
        return kind(f"{operation} on {self.device}: {text}")

    def is_lost(self) -> bool:
        """Say whether the device fails whatever is asked of it, an empty kernel for one."""
        launch = CudaLaunch(device=self.ordinal, stream=self.probe_stream.cuda_stream)
        try:
            if torch.cuda.is_current_stream_capturing():
                return False  # nothing can be waited for now; the capture itself will fail
            status: int = self.library.ql_cuda_empty(launch)
            self.probe_stream.synchronize()
        except RuntimeError:
            return True
        return status != Status.OK

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait for all work of `stream`, by default torch's current one.

        Raises:
            DeviceLost: a kernel failed on the way; no result is worth anything.
        """
        with self.on(stream) as used:
            try:
                used.synchronize()
            except RuntimeError as error:
                raise self.error("wait", str(error)) from error

    def _last_error(self) -> str:
        return str(self.library.ql_cuda_error_text().decode(errors="replace"))
