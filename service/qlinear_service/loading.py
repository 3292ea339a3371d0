"""From a path to layers that are proven to compute rightly: load, build kernels, test, measure.

Blocking work for the engine's thread; knows neither grpc nor queues.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from qlinear_service import models, probe
from qlinear_service.checkpoints import PlainOptions
from qlinear_service.config import KernelConfig
from qlinear_service.cost import CostCurve
from qlinear_service.curves import HostStepper, cost_curves
from qlinear_service.errors import CheckpointError
from qlinear_service.gpu.choice import choose_device
from qlinear_service.gpu.loading import GpuPlace
from qlinear_service.gpu.places import GpuPlaces
from qlinear_service.gpu.stepper import DeviceStepper
from qlinear_service.gpu.streams import Device
from qlinear_service.kernels.assembly import Converter
from qlinear_service.kernels.backends import CpuKernels, Kernels, load_kernels
from qlinear_service.layers import LayerRegistry, LayerSpec, QuantizedLinear
from qlinear_service.loaded import Loaded, Replica
from qlinear_service.log_values import event
from qlinear_service.measured import MeasuredDevice, Telemetry
from qlinear_service.roofline import Roofline
from qlinear_service.selftest import run_self_test

__all__ = ["HostPlace", "Loaded", "Place", "load"]

logger = logging.getLogger(__name__)

Put = Callable[[QuantizedLinear], QuantizedLinear]


class Place(Protocol):
    """Where layers are put and computed: the host, or a GPU (`GpuPlace`)."""

    @property
    def kernels(self) -> Kernels:
        """What multiplies there."""

    @property
    def device(self) -> Device | None:
        """What the engine works with; None is the host itself."""

    @property
    def telemetry(self) -> Telemetry | None:
        """What the device says of itself."""

    def check_fits(self, specs: Iterable[LayerSpec]) -> None:
        """Raise OutOfDeviceMemory if such layers cannot fit."""

    def filling(self) -> contextlib.AbstractContextManager[Put]:
        """Yield what puts one layer there."""

    def self_test(self, layers: Iterable[QuantizedLinear]) -> int:
        """Compare the kernels with the reference; return how many kinds of layers were tested."""

    def probe(self) -> Roofline:
        """Return what reading and multiplying take there at least."""

    def tuned_bandwidths(
        self, layers: Iterable[QuantizedLinear]
    ) -> Iterable[tuple[str, int, float]]:
        """Return shape, rows and bytes per second where a measured plan is known for a layer."""

    def replicas(self) -> tuple[Replica, ...]:
        """Return the devices that hold all layers each, where there are several."""

    def devices(self, layers: LayerRegistry) -> tuple[MeasuredDevice, ...]:
        """Return what each device holds of the loaded layers, where there are several."""


class HostPlace:
    """The memory of the host, and the CPU."""

    device = None
    telemetry = None

    def __init__(self, config: KernelConfig, stop: threading.Event) -> None:
        self._threads = config.cpu_threads
        self.kernels = load_kernels(
            cache_dir=config.cache_dir,
            threads=config.cpu_threads,
            torch_only=config.torch_only,
            batch_invariant=config.batch_invariant,
            stop=stop,
        )

    def check_fits(self, specs: Iterable[LayerSpec]) -> None:
        """Do nothing: layers of packed files are mapped and take no memory of their own."""

    @contextlib.contextmanager
    def filling(self) -> Iterator[Put]:
        """Yield what leaves a layer where it is."""
        yield lambda layer: layer

    def self_test(self, layers: Iterable[QuantizedLinear]) -> int:
        """See `run_self_test`."""
        return run_self_test(self.kernels, layers)

    def probe(self) -> Roofline:
        """Return what this machine can do."""
        return probe.measure(self.kernels, threads=self._threads)

    def tuned_bandwidths(
        self, layers: Iterable[QuantizedLinear]
    ) -> Iterable[tuple[str, int, float]]:
        """Return nothing: there are no plans on the CPU."""
        return ()

    def replicas(self) -> tuple[Replica, ...]:
        """Return nothing: there is one host."""
        return ()

    def devices(self, layers: LayerRegistry) -> tuple[MeasuredDevice, ...]:
        """Return nothing: there is one host."""
        return ()


def load(path: Path, config: KernelConfig, stop: threading.Event) -> Loaded:
    """Return the layers under `path` and kernels that agree with the reference on each kind.

    Args:
        path: a packed file, a checkpoint folder, or a folder of several models.
        config: where and with what layers are computed.
        stop: set when nobody wants the result any more; looked at between layers and in builds.

    Raises:
        CheckpointError: a file cannot be read as what it claims to be, or there is no layer.
        BuildError: the kernels do not compile or the device cannot be used, or `stop` came first.
        OutOfDeviceMemory: the layers do not fit onto the device; none is left on it.
        SelfTestError: the kernels compute wrongly.
    """
    config = choose_device(config).config
    sources = models.discover(path, plain=PlainOptions(treatment=config.unquantized))
    # The reference, and the kernels where they hand work to torch, keep to the same bound.
    torch.set_num_threads(config.cpu_threads)
    place = _place(config, stop)
    kernels = place.kernels
    # Slow kernels that nobody asked for must be seen at any level.
    unwanted = kernels.name == "torch" and not config.torch_only
    level = logging.WARNING if unwanted else logging.INFO
    event(logger, level, "kernels", name=kernels.name, description=kernels.description)
    converter = Converter(device=torch.device(config.device))
    if isinstance(kernels, CpuKernels):
        converter = Converter(pack_codes=kernels.pack_codes)
    place.check_fits(spec for source in sources for spec in source.specs)
    registry = LayerRegistry()
    with place.filling() as put:
        for source in sources:
            if not _load_model(source, registry, put, stop, converter):
                return Loaded(registry=registry, kernels=kernels)
    if not len(registry):
        raise CheckpointError(path, "holds no linear layer that is served (see --unquantized)")
    started = time.perf_counter()
    kinds = place.self_test(registry)
    seconds = time.perf_counter() - started
    event(logger, logging.INFO, "self_test", kinds=kinds, seconds=seconds)
    roofline = _probe(place)
    return Loaded(
        registry=registry,
        kernels=kernels,
        roofline=roofline,
        curves=_curves(place, registry, config, stop),
        gpu=place.device,
        telemetry=place.telemetry,
        tuned_bandwidths=tuple(place.tuned_bandwidths(registry)),
        replicas=place.replicas(),
        devices=place.devices(registry),
    )


def _place(config: KernelConfig, stop: threading.Event) -> Place:
    if config.device == "cpu":
        return HostPlace(config, stop)
    return (GpuPlaces if len(config.device_names) > 1 else GpuPlace)(config, stop)


def _load_model(
    source: models.ModelSource,
    registry: LayerRegistry,
    put: Put,
    stop: threading.Event,
    converter: Converter,
) -> bool:
    """Put the layers of one model where they are computed; return False if `stop` came first."""
    started, loaded = time.perf_counter(), 0
    for layer in source.load_layers(converter):
        if stop.is_set():
            return False
        registry.add(put(layer))
        loaded += 1
    seconds = time.perf_counter() - started
    values = {"model": source.name, "layers": loaded, "seconds": seconds}
    event(logger, logging.INFO, "loaded", **values)
    return True


def _curves(
    place: Place, registry: LayerRegistry, config: KernelConfig, stop: threading.Event
) -> dict[str, CostCurve]:
    """Return what batches of each shape cost there; none if that is not to be measured."""
    if not config.measure_seconds:
        return {}
    kernels, device = place.kernels, f"{place.kernels.name}: {place.kernels.description}"
    stepper: HostStepper | DeviceStepper = HostStepper(kernels)
    if place.device is not None:
        stepper = DeviceStepper(place.device, config.transfers)
        device += f", {config.transfers}"
        if len(config.device_names) > 1:
            device += f", {config.device_mode} over {len(config.device_names)}"
    return cost_curves(
        stepper,
        registry,
        device=device,
        cache_dir=config.cache_dir,
        most_seconds=config.measure_seconds,
        stop=stop,
    )


def _probe(place: Place) -> Roofline:
    started = time.perf_counter()
    roofline = place.probe()
    event(
        logger,
        logging.INFO,
        "probe",
        peak_bytes_per_second=roofline.peak_bytes_per_second,
        products_per_second=roofline.products_per_second,
        seconds=time.perf_counter() - started,
    )
    return roofline
