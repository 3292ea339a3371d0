"""The models that the chaos suite serves: small layers that together have every feature."""

from pathlib import Path

from random_layers import random_layer, unquantized_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed_writer import write_packed


def chaos_layers() -> list[QuantizedLinear]:
    """Return the layers of both models; several have the same k, so that one call may ask them."""
    layers = [
        random_layer(n=40, k=96, group_size=32, bias=True, model="one", module="up"),
        random_layer(n=24, k=96, group_size=32, symmetric=False, model="one", module="down"),
        random_layer(n=72, k=96, bits=8, group_size=32, model="one", module="eight"),
        random_layer(n=16, k=96, group_size=32, permuted=True, model="two", module="down"),
        random_layer(
            n=300, k=256, scale_dtype=DType.BF16, symmetric=False, model="two", module="wide"
        ),
        random_layer(n=256, k=512, group_size=-1, bias=True, model="two", module="deep", seed=7),
        unquantized_layer(n=50, k=512, bias=True, model="two", module="plain"),
    ]
    return [pack(layer) for layer in layers]


def write_models(folder: Path, layers: list[QuantizedLinear]) -> Path:
    """Write one packed file for each model and return the folder."""
    for model in sorted({layer.spec.model for layer in layers}):
        own = [layer for layer in layers if layer.spec.model == model]
        path = folder / f"{model}.safetensors"
        write_packed(path, model, own, specs=[layer.spec for layer in own])
    return folder
