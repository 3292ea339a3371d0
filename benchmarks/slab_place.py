"""The layer that `bench slab` feeds: made up, on the device, with its cost curve."""

import contextlib
import threading
from pathlib import Path
from unittest import mock

import torch

from qlinear_service.config import KernelConfig
from qlinear_service.curves import HostStepper, measure_curves
from qlinear_service.dtypes import DType
from qlinear_service.gpu import choice, loading
from qlinear_service.gpu.loading import GpuPlace
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.gpu.stepper import DeviceStepper
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.loaded import Loaded
from qlinear_service.loading import HostPlace, Place

MEASURE_SECONDS = 10


def use_library(library: Path) -> None:
    """Take the GPU kernels of a file, built elsewhere, from now on."""
    given = contextlib.nullcontext(library)
    mock.patch.object(choice, "find_cuda_library", return_value=(library, "")).start()
    mock.patch.object(loading, "cuda_library", return_value=given).start()


def place_of(device: str, library: Path | None) -> Place:
    """Return where layers are put; with the kernels of `library`, if that is given."""
    if library is not None:
        use_library(library)
    kind: type[HostPlace] | type[GpuPlace] = HostPlace if device == "cpu" else GpuPlace
    return kind(KernelConfig(device=device), threading.Event())


def layer_of(device: str, k: int, n: int, module: str = "layer") -> QuantizedLinear:
    """Return a made-up layer there, by that name."""
    return made_up_layer(
        n=n, k=k, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
        device=torch.device(device), module=module,
    )  # fmt: skip


def load(place: Place, device: str, k: int, n: int) -> Loaded:
    """Return one made-up layer on the device, and its curve."""
    layer = layer_of(device, k, n)
    stepper: HostStepper | DeviceStepper = HostStepper(place.kernels)
    if place.device is not None:
        stepper = DeviceStepper(place.device)
    shapes = {layer.spec.shape: [layer]}
    curves = measure_curves(stepper, shapes, most_seconds=MEASURE_SECONDS, stop=threading.Event())
    return Loaded(
        registry=LayerRegistry([layer]),
        kernels=place.kernels,
        gpu=place.device,
        curves=curves,
        roofline=place.probe() if place.device is not None else None,
    )
