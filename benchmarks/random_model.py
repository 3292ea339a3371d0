"""Random layers for benchmarks: symmetric 4-bit codes in groups of 128, as GPTQ writes them."""

from pathlib import Path

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LayerSpec, LogicalLayer, QuantizedLinear
from qlinear_service.packed_writer import write_packed

MODEL = "bench"


def random_layer(module: str, n: int, k: int, seed: int = 0) -> LogicalLayer:
    """Return one layer with scales that keep results near 1 for x near 1."""
    draw = torch.Generator().manual_seed(seed)
    spec = LayerSpec(
        model=MODEL,
        module=module,
        n=n,
        k=k,
        bits=4,
        group_size=128,
        symmetric=True,
        has_bias=False,
        scale_dtype=DType.F16,
    )
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=draw)
    scales = (torch.rand((k // 128, n), generator=draw) * 0.2 / k**0.5).half()
    return LogicalLayer(spec=spec, codes=codes, scales=scales)


def packed_layer(module: str, n: int, k: int) -> QuantizedLinear:
    """Return one random layer in the runtime layout."""
    return pack(random_layer(module, n, k))


def write_model(folder: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    """Write a packed file of random layers; shapes: (n, k) by module."""
    path = folder / f"{MODEL}.safetensors"
    layers = [packed_layer(module, n, k) for module, (n, k) in shapes.items()]
    write_packed(path, MODEL, layers, specs=[layer.spec for layer in layers])
    return path
