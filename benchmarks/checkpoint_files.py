"""A GPTQ checkpoint in the shape of a 7B Llama, with random codes, written without holding it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

GROUP_SIZE = 128
SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 4096),
    "self_attn.v_proj": (4096, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (11008, 4096),
    "mlp.up_proj": (11008, 4096),
    "mlp.down_proj": (4096, 11008),
}
"""n and k of the linear layers of one block."""

BLOCKS = 32
CONFIG = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": True, "desc_act": False,
}  # fmt: skip


def write_checkpoint(folder: Path, *, blocks: int = BLOCKS, divisor: int = 1) -> int:
    """Write the checkpoint as one file per block, and return the bytes of its codes.

    Args:
        folder: made if it is not there.
        blocks: of the model.
        divisor: every n and k is divided by it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quantize_config.json").write_text(json.dumps(CONFIG))
    draw, code_bytes = np.random.default_rng(7), 0
    weight_map: dict[str, str] = {}
    for block in range(blocks):
        name = f"model-{block + 1:05}-of-{blocks:05}.safetensors"
        entries = list(_entries(f"model.layers.{block}", divisor))
        weight_map |= dict.fromkeys((entry[0] for entry in entries), name)
        code_bytes += _write(folder / name, entries, draw)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return code_bytes


def _entries(block: str, divisor: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of each tensor of one block."""
    for module, (n, k) in SHAPES.items():
        n, k = n // divisor, k // divisor
        groups = -(-k // GROUP_SIZE)
        yield f"{block}.{module}.qweight", "I32", (k // 8, n)
        yield f"{block}.{module}.qzeros", "I32", (groups, n // 8)
        yield f"{block}.{module}.scales", "F16", (groups, n)


def _write(
    path: Path, entries: list[tuple[str, str, tuple[int, ...]]], draw: np.random.Generator
) -> int:
    header, offset = {}, 0
    for name, dtype, shape in entries:
        nbytes = int(np.prod(shape)) * {"I32": 4, "F16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    code_bytes = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, _, shape in entries:
            kind = name.rpartition(".")[2]
            if kind == "qweight":
                codes = draw.integers(0, 1 << 32, shape, dtype=np.uint32)
                code_bytes += file.write(codes.data)
            elif kind == "qzeros":
                file.write(np.full(shape, 0x77777777, dtype=np.uint32).data)
            else:
                file.write((draw.random(shape, dtype=np.float32) * 0.01).astype(np.float16).data)
    return code_bytes
