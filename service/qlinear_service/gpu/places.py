"""Several GPUs of one kind that layers are put onto: shared out over them, or onto each.

Blocking work for the thread that loads. Knows no model and no file.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from qlinear_service.config import SPLIT, KernelConfig
from qlinear_service.gpu.express import Trip, row_stride
from qlinear_service.gpu.loading import GpuPlace
from qlinear_service.gpu.split import Part, SplitDevice, outline, ranges
from qlinear_service.gpu.streams import Device
from qlinear_service.gpu.ways import Way
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, LayerSpec, QuantizedLinear
from qlinear_service.loaded import Replica
from qlinear_service.measured import MeasuredDevice, Share
from qlinear_service.roofline import Roofline
from qlinear_service.selftest import SLAB_FEATURES, compare_features, kind_of

__all__ = ["GpuPlaces", "check_columns"]

WHOLE_ROWS = 5
"""Rows of the test that looks at where each device's columns go."""

Put = Callable[[QuantizedLinear], QuantizedLinear]


class GpuPlaces:
    """GPUs side by side.

    Args:
        config: which GPUs, and what each of them does.
        stop: set when nobody wants the kernels any more; ends a build.

    Raises:
        ConfigError: one of them is not there, or there are no kernels for it.
        BuildError: the kernels cannot be built or loaded, or a GPU cannot be used.
    """

    telemetry = None
    """That of each device is in `devices`."""

    def __init__(self, config: KernelConfig, stop: threading.Event) -> None:
        self._names = config.device_names
        self._places = [
            GpuPlace(replace(config, devices="", device=name), stop) for name in self._names
        ]
        self.kernels = self._places[0].kernels
        self.device: Device | None = self._places[0].device
        self._split: SplitDevice | None = None
        self._registries = [LayerRegistry() for _ in self._places]
        """What each GPU holds: all layers, or its part of them."""
        if config.device_mode == SPLIT:
            self.device = self._split = SplitDevice(self._devices())

    def _devices(self) -> dict[str, Device]:
        found: dict[str, Device] = {}
        for name, place in zip(self._names, self._places, strict=True):
            assert place.device is not None, "a GPU is there to compute"
            found[name] = place.device
        return found

    def check_fits(self, specs: Iterable[LayerSpec]) -> None:
        """Raise OutOfDeviceMemory if what belongs onto a GPU cannot fit there."""
        known = list(specs)
        for number, place in enumerate(self._places):
            place.check_fits(self._specs_on(number, known))

    def _specs_on(self, number: int, specs: list[LayerSpec]) -> Iterator[LayerSpec]:
        if self._split is None:
            yield from specs
            return
        for spec in specs:
            begin, end = ranges(spec, len(self._places))[number]
            if begin < end:
                yield replace(spec, n=end - begin)

    @contextlib.contextmanager
    def filling(self) -> Iterator[Put]:
        """Yield what puts one layer onto the GPUs; after an error nothing stays there.

        What it returns is the layer on the first of them, or its outline where it is shared out.

        Raises:
            OutOfDeviceMemory: a layer found no room.
        """
        with contextlib.ExitStack() as stack:
            puts = [stack.enter_context(place.filling()) for place in self._places]
            yield lambda layer: self._put(layer, puts)

    def _put(self, layer: QuantizedLinear, puts: list[Put]) -> QuantizedLinear:
        if self._split is None:
            for put, registry in zip(puts, self._registries, strict=True):
                registry.add(put(layer))
            return self._registries[0].resolve(layer.spec.name)
        parts = [
            Part(place, begin, end, puts[place](layer.features(begin, end)))
            for place, (begin, end) in enumerate(ranges(layer.spec, len(puts)))
            if begin < end
        ]
        for part in parts:
            self._registries[part.place].add(part.layer)
        whole = outline(layer)
        self._split.add(whole, parts)
        return whole

    def self_test(self, layers: Iterable[QuantizedLinear]) -> int:
        """Compare every kernel of every GPU with the reference; then what they make together.

        Raises:
            SelfTestError: a kernel computes wrongly, or columns are not where they belong.
            OutOfDeviceMemory: there was no room for the test.
        """
        tested = [
            place.self_test(registry)
            for place, registry in zip(self._places, self._registries, strict=True)
        ]
        if self._split is None:
            return max(tested)
        kinds = set()
        for layer in layers:
            if kind_of(layer.spec) not in kinds:
                kinds.add(kind_of(layer.spec))
                check_columns(self._split, layer)
        return max(*tested, len(kinds))

    def probe(self) -> Roofline:
        """Return what was measured before layers were loaded, of all that compute a batch."""
        one = self._places[0].probe()
        return one if self._split is None else one.together(len(self._places))

    def tuned_bandwidths(
        self, layers: Iterable[QuantizedLinear]
    ) -> Iterable[tuple[str, int, float]]:
        """Return nothing: what tables say is told of each device."""
        return ()

    def replicas(self) -> tuple[Replica, ...]:
        """Return the GPUs that hold all layers each; none where layers are shared out."""
        if self._split is not None:
            return ()
        pairs = zip(self._devices().items(), self._registries, strict=True)
        return tuple(Replica(name, device, registry) for (name, device), registry in pairs)

    def devices(self, layers: LayerRegistry) -> tuple[MeasuredDevice, ...]:
        """Return what metrics are to know of each GPU.

        Args:
            layers: the loaded ones, whole.
        """
        found = []
        for name, place, held in zip(self._names, self._places, self._registries, strict=True):
            shapes = {x.spec.name: layers.resolve(x.spec.name).spec.shape for x in held}
            tuned = (
                (shapes[one.spec.name], rows, rate)
                for one in held
                for _, rows, rate in place.tuned_bandwidths([one])
            )
            shares = {
                one.spec.name: Share(one.spec.n, one.streamed_bytes, one.packed_bytes)
                for one in held
            }
            found.append(
                MeasuredDevice(
                    name=name,
                    roofline=place.probe(),
                    telemetry=place.telemetry,
                    tuned_bandwidths=tuple(tuned),
                    shares=shares,
                )
            )
        return tuple(found)


def check_columns(split: SplitDevice, layer: QuantizedLinear) -> None:
    """Compute some rows on all devices and compare every column with the reference.

    Raises:
        SelfTestError: a column is not what it should be.
    """
    spec, dtype = layer.spec, layer.spec.compute_dtype
    draw = torch.Generator().manual_seed(spec.k)
    x = torch.randn((WHOLE_ROWS, spec.k), generator=draw).to(to_torch(dtype))
    stage = split.new_stage()
    x_bytes, item = x.numel() * dtype.itemsize, dtype.itemsize
    stage.grow(WHOLE_ROWS * row_stride(spec.k) * item, WHOLE_ROWS * spec.n * item)
    stage.x.host[:x_bytes] = x.view(torch.uint8).view(-1)
    trip = Trip(
        layer=layer, stage=stage, parts=[stage.x.host.data_ptr(), WHOLE_ROWS], rows=WHOLE_ROWS,
        x_dtype=dtype, y_dtype=dtype, way=Way(gather=False, scatter=False), alone=False,
    )  # fmt: skip
    split.submit(trip)
    split.wait(stage.marks)
    flat = bytearray(split.results(stage, layer, WHOLE_ROWS, dtype))
    y = torch.frombuffer(flat, dtype=x.dtype).view(WHOLE_ROWS, spec.n)
    for part in split.parts_of(layer):
        device = part.layer.qweight.device
        columns = y[:, part.begin : part.end].to(device)
        for begin in range(0, part.layer.spec.n, SLAB_FEATURES):
            end = min(begin + SLAB_FEATURES, part.layer.spec.n)
            compare_features(
                f"columns of {device}", part.layer, x.to(device), columns, begin=begin, end=end
            )
