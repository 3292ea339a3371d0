"""The all-MiniLM-L6-v2 sentence encoder with its linear layers taken out.

Embeddings, attention and normalization run here, in float32 torch; every linear layer is asked
for by name through an async function, so that a server can answer it. README.md beside this file
describes the model and its files.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

HERE = Path(__file__).parent
LAYERS = 6
HEADS = 12
LAYER_NORM_EPS = 1e-12

Linears = Callable[[list[str], torch.Tensor], Awaitable[list[torch.Tensor]]]
"""Layers of one input, x float32 [tokens, k] -> one float32 [tokens, n] each."""


@dataclass(frozen=True)
class Sentence:
    """One sentence with its word pieces and its reference embedding."""

    text: str
    group: str
    role: str
    token_ids: list[int]
    reference: torch.Tensor  # float32 [384]


def load_sentences() -> list[Sentence]:
    """Return the 24 sentences with the embeddings of the dequantized model."""
    reference = load_file(HERE / "reference.safetensors")["gptq"]
    entries = json.loads((HERE / "sentences.json").read_text())["sentences"]
    return [
        Sentence(
            text=entry["text"],
            group=entry["group"],
            role=entry["role"],
            token_ids=entry["token_ids"],
            reference=reference[entry["index"]],
        )
        for entry in entries
    ]


class Encoder:
    """What is left of the model when a server has the linear layers."""

    def __init__(self) -> None:
        self._tensors = load_file(HERE / "rest.safetensors")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, LAYER_NORM_EPS)

    def _embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        words = self._tensors["embeddings.word_embeddings.weight"][list(token_ids)]
        positions = self._tensors["embeddings.position_embeddings.weight"][: len(token_ids)]
        kind = self._tensors["embeddings.token_type_embeddings.weight"][0]
        return self._norm(words + positions + kind, "embeddings.LayerNorm")

    async def encode(self, token_ids: Sequence[int], linears: Linears) -> torch.Tensor:
        """Return the sentence embedding, float32 [384], of length one."""
        hidden = self._embed(token_ids)
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            attention = f"{name}.attention"
            parts = [f"{attention}.self.{part}" for part in ("query", "key", "value")]
            query, key, value = await linears(parts, hidden)
            mixed = _attend(query, key, value)
            (projected,) = await linears([f"{attention}.output.dense"], mixed)
            attended = self._norm(projected + hidden, f"{attention}.output.LayerNorm")
            (wide,) = await linears([f"{name}.intermediate.dense"], attended)
            (narrow,) = await linears([f"{name}.output.dense"], F.gelu(wide))
            hidden = self._norm(narrow + attended, f"{name}.output.LayerNorm")
        return F.normalize(hidden.mean(dim=0), dim=0)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    def split(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), HEADS, -1).transpose(0, 1)

    heads = F.scaled_dot_product_attention(split(query), split(key), split(value))
    return heads.transpose(0, 1).reshape(len(query), -1)
