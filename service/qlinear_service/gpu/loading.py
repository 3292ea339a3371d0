"""Puts layers onto a GPU one at a time, and says in one sentence when they do not fit.

Blocking work for the thread that loads. Knows no model and no file.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from qlinear_service.config import KernelConfig
from qlinear_service.errors import BuildError, OutOfDeviceMemory
from qlinear_service.gpu import probe
from qlinear_service.gpu.choice import architecture_for
from qlinear_service.gpu.selftest import run_gpu_self_test
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.telemetry import open_telemetry
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.cuda_library import cuda_library
from qlinear_service.kernels.tuned_plans import read_tables
from qlinear_service.layers import LayerRegistry, LayerSpec, QuantizedLinear
from qlinear_service.loaded import Replica
from qlinear_service.log_values import event
from qlinear_service.measured import MeasuredDevice, Telemetry
from qlinear_service.roofline import Roofline

__all__ = ["RESERVE_BYTES", "GpuPlace", "device_bytes"]

logger = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 30
"""Stays free beside the layers, for buffers of batches, workspaces and the self-test."""

GIB = 1 << 30
WAYS_OUT = "serve fewer layers, use another GPU, or end what else is on this one"


class GpuPlace:
    """One GPU that layers are put onto.

    Args:
        config: which GPU, and how it computes.
        stop: set when nobody wants the kernels any more; ends a build.

    Raises:
        ConfigError: there is no such GPU, or no kernels for it.
        BuildError: the kernels cannot be built or loaded, or the GPU cannot be used.
    """

    def __init__(self, config: KernelConfig, stop: threading.Event) -> None:
        self.name = config.device
        (ordinal,) = config.cuda_ordinals
        architecture = architecture_for(ordinal)
        with cuda_library(config.cache_dir, (architecture,), stop=stop) as library:
            try:
                self.kernels = CudaKernels(
                    library,
                    device=ordinal,
                    batch_invariant=config.batch_invariant,
                    tables=read_tables(config.cache_dir),
                )
                self.device: CudaStreams | None = CudaStreams(self.kernels)
                self._roofline = probe.measure(self.kernels)
            except RuntimeError as error:  # torch's words for a full or broken GPU
                raise BuildError(f"{self.name} cannot be used: {_first_line(error)}") from error
        self.telemetry: Telemetry | None = open_telemetry(self.kernels.device)
        event(
            logger,
            logging.INFO,
            "gpu",
            name=self.name,
            free_bytes=self._memory()[0],
            event_pair_nanoseconds=self.device.pair_nanoseconds,
            telemetry=self.telemetry is not None,
        )

    def check_fits(self, specs: Iterable[LayerSpec]) -> None:
        """Raise OutOfDeviceMemory if layers are larger than what is free, before reading any."""
        needed = sum(map(device_bytes, specs))
        free, total = self._memory()
        if needed + RESERVE_BYTES > free:
            raise OutOfDeviceMemory(
                f"the layers take {needed / GIB:.2f} GiB on {self.name} and must leave "
                f"{RESERVE_BYTES / GIB:g} GiB, but {free / GIB:.2f} of {total / GIB:.2f} GiB are "
                f"free; {WAYS_OUT}"
            )

    @contextlib.contextmanager
    def filling(self) -> Iterator[Callable[[QuantizedLinear], QuantizedLinear]]:
        """Yield what puts one layer onto the GPU; after an error nothing stays there.

        Raises:
            OutOfDeviceMemory: a layer found no room.
        """
        try:
            yield self._put
            torch.cuda.current_stream(self.kernels.device).synchronize()
        except BaseException:
            # The caller lets go of what was loaded; what torch keeps for later goes, too.
            torch.cuda.empty_cache()
            raise

    def _put(self, layer: QuantizedLinear) -> QuantizedLinear:
        try:
            return self.kernels.to_device(layer)
        except torch.OutOfMemoryError as error:
            free, total = self._memory()
            raise OutOfDeviceMemory(
                f"{self.name} has no room for layer {layer.spec.name!r}, which takes "
                f"{layer.packed_bytes / GIB:.2f} GiB: {free / GIB:.2f} of {total / GIB:.2f} GiB "
                f"are free; {WAYS_OUT}"
            ) from error

    def self_test(self, layers: Iterable[QuantizedLinear]) -> int:
        """Compare every kernel with the reference; return how many kinds of layers were tested.

        Raises:
            SelfTestError: a kernel computes wrongly.
            OutOfDeviceMemory: there was no room for the test.
        """
        try:
            # What is not quantized goes through torch, which is what the test compares with.
            coded = (layer for layer in layers if layer.spec.quantized)
            kinds = run_gpu_self_test(self.kernels, coded)
            torch.cuda.empty_cache()
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"{self.name} has no room left to test its kernels: {_first_line(error)}"
            ) from error
        return kinds

    def probe(self) -> Roofline:
        """Return what was measured before layers were loaded."""
        return self._roofline

    def tuned_bandwidths(
        self, layers: Iterable[QuantizedLinear]
    ) -> Iterable[tuple[str, int, float]]:
        """Return shape, rows and bytes per second for what tables say was measured of layers."""
        return self.kernels.known.tuned_bandwidths(layers)

    def replicas(self) -> tuple[Replica, ...]:
        """Return nothing: it is the only one."""
        return ()

    def devices(self, layers: LayerRegistry) -> tuple[MeasuredDevice, ...]:
        """Return nothing: it is the only one."""
        return ()

    def _memory(self) -> tuple[int, int]:
        """Return the free and all bytes of the GPU; what torch keeps unused counts as free."""
        device = self.kernels.device
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept, total


def device_bytes(spec: LayerSpec) -> int:
    """Return what a layer takes at most, from its shape alone."""
    if not spec.quantized:
        return spec.n_padded * (spec.k * spec.scale_dtype.itemsize + 4)
    columns = spec.groups * spec.n_padded
    weights = spec.n_padded * spec.k_padded * spec.bits // 8
    scales = columns * (spec.scale_dtype.itemsize + (0 if spec.symmetric else 1))
    bias = 4 * spec.n_padded if spec.has_bias else 0
    return weights + scales + bias + (4 * spec.k if spec.has_k_permutation else 0)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
