"""How much memory layers take once they have computed, measured in a process of its own.

Counts whatever a kernel keeps beside the packed bytes: repacked or dequantized copies, cached
slabs. The same rows go through a small layer first, so that libraries, threads and buffers of
activations are not counted.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from processes import status_bytes
from random_model import write_model

from qlinear_service.dtypes import DType
from qlinear_service.kernels.backends import Kernels, load_kernels
from qlinear_service.kernels.build import default_cache_dir
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed import PackedFile

LAYERS = 8
"""Enough for the weights to dwarf what else changes."""
ROWS = (1, 16, 64, 256)
SMALL = "small"


def resident_ratio(features: int, threads: int) -> float:
    """Return resident bytes for each packed byte of square layers of `features`."""
    with tempfile.TemporaryDirectory() as folder:
        shapes = {f"large{i}": (features, features) for i in range(LAYERS)}
        path = write_model(Path(folder), {SMALL: (64, features), **shapes})
        words = [sys.executable, __file__, str(path), str(threads)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, process_group=0)
    return float(done.stdout)


def use(kernels: Kernels, layer: QuantizedLinear) -> None:
    """Run the layer with every number of rows."""
    for rows in ROWS:
        kernels.linear(layer, torch.ones(rows, layer.spec.k).bfloat16(), DType.BF16)


def main() -> None:
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    kernels = load_kernels(cache_dir=default_cache_dir(), threads=threads)
    file = PackedFile(path)
    use(kernels, file.load(SMALL))
    before = status_bytes("self", "VmRSS")
    layers = [file.load(spec.module) for spec in file.specs if spec.module != SMALL]
    for layer in layers:
        use(kernels, layer)
    grown = status_bytes("self", "VmRSS") - before
    print(grown / sum(layer.packed_bytes for layer in layers))


if __name__ == "__main__":
    main()
