"""Checkpoints for tests: the real vectors in tests/data, and small GPTQ folders with one fault."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qlinear_service.checkpoints import PlainOptions
from qlinear_service.kernels.reference import dequantize
from qlinear_service.layers import LogicalLayer, QuantizedLinear
from qlinear_service.models import open_model

VECTORS = Path(__file__).parent / "data" / "vectors"

EXPECTED: dict[str, str] = {
    path.parent.name: json.loads(path.read_text())["expect"]
    for path in sorted(VECTORS.glob("*/vector.json"))
}
"""What a loader should do with each vector, by name; `malformed` has cases of its own."""

PLAIN = tuple(name for name in EXPECTED if name.startswith("plain-"))
LOADED = (
    *(name for name, text in EXPECTED.items() if text.startswith("load") and name not in PLAIN),
    "optional-awq-autoawq-layer-marlin-n256-k256-g128-bias",
)
"""Vectors that are loaded with the very codes, scales and zero points that they hold."""

SMALL = "gptq-autogptq-layer-n64-k96-g32-sym"
"""One layer, 64 x 96, group 32; most of the malformed cases are edits of it."""

CONFIG: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
}  # fmt: skip


def weight_hashes(vector: str) -> dict[str, str]:
    """SHA-256 of the float32 [n, k] weight of each module of a vector."""
    content = json.loads((VECTORS / vector / "vector.json").read_text())
    return {name: module["weight_sha256"] for name, module in content["modules"].items()}


def weight_hash(layer: LogicalLayer | QuantizedLinear) -> str:
    """The same of a loaded layer."""
    return hashlib.sha256(dequantize(layer).numpy().tobytes()).hexdigest()


def packed_layers(folder: Path, treatment: str = "auto") -> list[QuantizedLinear]:
    """All layers of a checkpoint, as they are served."""
    model = open_model(folder, plain=PlainOptions(treatment=treatment))
    return list(model.load_layers())


def gptq_tensors(
    module: str = "layer", *, k: int = 64, n: int = 16, group_size: int = 32, zero: int = 7
) -> dict[str, torch.Tensor]:
    """The tensors of one GPTQ module with seeded codes; stored zero points are all `zero`."""
    draw = torch.Generator().manual_seed(k * n)
    groups = 1 if group_size == -1 else -(-k // group_size)
    word = int(f"{zero:x}" * 8, 16)
    zeros = torch.full((groups, -(-n // 8)), word, dtype=torch.int64).to(torch.int32)
    low, high = -(2**31), 2**31
    return {
        f"{module}.qweight": torch.randint(
            low, high, (k // 8, n), dtype=torch.int32, generator=draw
        ),
        f"{module}.qzeros": zeros,
        f"{module}.scales": torch.randn((groups, n), generator=draw).half(),
        f"{module}.g_idx": (
            torch.zeros(k).int() if group_size == -1 else torch.arange(k).int() // group_size
        ),
        f"{module}.bias": torch.randn(n, generator=draw).half(),
    }


def write_checkpoint(
    folder: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    name: str = "model.safetensors",
    **settings: Any,
) -> Path:
    """Write a GPTQ checkpoint; a setting of None is left out of the configuration."""
    folder.mkdir(exist_ok=True)
    config = {k: v for k, v in {**CONFIG, **settings}.items() if v is not None}
    (folder / "quantize_config.json").write_text(json.dumps(config))
    save_file(gptq_tensors() if tensors is None else tensors, folder / name)
    return folder
