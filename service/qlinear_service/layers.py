"""What a linear layer is, in its two forms, and the table of loaded layers.

`LogicalLayer` is what a checkpoint says (codes, scales, zero points in k and n order);
`QuantizedLinear` is the same layer in the runtime layout that every kernel reads.
Nothing here reads files or multiplies.
"""

import difflib
import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from os.path import commonprefix

import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import InvalidRequest, UnknownLayer
from qlinear_service.kernels import layout
from qlinear_service.log_values import printable

__all__ = [
    "UNQUANTIZED_BITS",
    "LayerRegistry",
    "LayerSpec",
    "LogicalLayer",
    "QuantizedLinear",
    "Source",
]

UNQUANTIZED_BITS = 16
"""`LayerSpec.bits` of a layer that stays as its checkpoint holds it, in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a layer came from: three different things, never one word."""

    tool: str = ""
    """The program that wrote the checkpoint, as far as the file says, e.g. "auto_gptq"."""
    format: str = ""
    """How the checkpoint packs codes, e.g. "gptq", "gptq_v2"."""
    method: str = ""
    """How the codes were chosen, e.g. "gptq", "rtn"."""

    def __post_init__(self) -> None:
        for name in ("tool", "format", "method"):  # from files: they may hold anything
            object.__setattr__(self, name, printable(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Shape and format of one layer: w[n, k] = scale[k // group_size, n] * (code[k, n] - zero)."""

    model: str
    """Name of the model; contains no "/"."""
    module: str
    """Name of the module inside the model, e.g. "encoder.layer.0.output.dense"."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    bits: int
    """Bits of one code: 4 or 8; 16 for a layer that is not quantized, whatever its dtype."""
    group_size: int
    """Input features that share a scale: 32, 64, 128, or -1 for the whole column."""
    symmetric: bool
    """True: the zero point is 2**(bits - 1) everywhere and none is stored."""
    has_bias: bool
    scale_dtype: DType
    """Of the scales; of the weight itself where the layer is not quantized."""
    has_k_permutation: bool = False
    """True: column i of the packed weight is input feature k_permutation[i] (act-order)."""
    source: Source = field(default_factory=Source)

    @property
    def name(self) -> str:
        """The full name, "<model>/<module>"."""
        return f"{self.model}/{self.module}"

    @property
    def quantized(self) -> bool:
        """Whether the layer has codes; otherwise torch multiplies with its weight."""
        return self.bits != UNQUANTIZED_BITS

    @property
    def n_padded(self) -> int:
        """n as stored: the next multiple of 64."""
        return layout.round_up(self.n, layout.PAD_N)

    @property
    def k_padded(self) -> int:
        """k as stored: the next multiple of 128."""
        return layout.round_up(self.k, layout.PAD_K)

    @property
    def groups(self) -> int:
        """Number of scale groups as stored, padding included."""
        return layout.group_count(self.k_padded, self.group_size)

    @property
    def shape(self) -> str:
        """The bounded label of metrics and tables, e.g. "k4096_n28672_b4_g128"."""
        group = "col" if self.group_size == -1 else str(self.group_size)
        return f"k{self.k}_n{self.n}_b{self.bits}_g{group}"

    @property
    def compute_dtype(self) -> DType:
        """What float32 activations are rounded to: bfloat16 if the scales are, else float16."""
        return DType.BF16 if self.scale_dtype is DType.BF16 else DType.F16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogicalLayer:
    """One layer as a checkpoint holds it, unpacked, in the model's own order.

    With act-order, k is already sorted so that groups are contiguous and `k_permutation` says how.
    """

    spec: LayerSpec
    codes: torch.Tensor
    """uint8 [k, n], each in 0 .. 2**bits - 1; the weight itself, in its dtype, if not quantized."""
    scales: torch.Tensor
    """float16, bfloat16 or float32 [ceil(k / group_size), n]; [1, n] for group_size -1; without
    elements if not quantized."""
    zeros: torch.Tensor | None = None
    """uint8, the shape of `scales`; None when symmetric."""
    bias: torch.Tensor | None = None
    """[n], float16, bfloat16 or float32."""
    k_permutation: torch.Tensor | None = None
    """int32 [k]: row i of `codes` is input feature k_permutation[i]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class QuantizedLinear:
    """One layer in the runtime layout (see csrc/layout.h for every order)."""

    spec: LayerSpec
    qweight: torch.Tensor
    """uint8 [n_padded / 16, k_padded / 64, tile bytes]; if not quantized, the weight itself:
    spec.scale_dtype [n_padded, k]."""
    scales: torch.Tensor
    """spec.scale_dtype [n_padded / 16, groups, 16]; without elements if not quantized."""
    zeros: torch.Tensor | None = None
    """uint8, the shape of `scales`; None when symmetric."""
    bias: torch.Tensor | None = None
    """[n_padded], float16, bfloat16 or float32."""
    k_permutation: torch.Tensor | None = None
    """int32 [k]."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of all tensors as stored, padding included."""
        tensors = (self.qweight, self.scales, self.zeros, self.bias, self.k_permutation)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of codes, scales and zero points: what each computation reads once."""
        tensors = (self.qweight, self.scales, self.zeros)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def features(self, begin: int, end: int) -> "QuantizedLinear":
        """Return output features `begin` to `end` as a layer of their own, as views.

        Args:
            begin: a multiple of 64, the padding of n.
            end: at most n.
        """
        padded_end = layout.round_up(end, layout.PAD_N)
        rows = layout.TILE_N if self.spec.quantized else 1
        first, last = begin // rows, padded_end // rows
        return QuantizedLinear(
            spec=replace(self.spec, n=end - begin),
            qweight=self.qweight[first:last],
            scales=self.scales[first:last],
            zeros=None if self.zeros is None else self.zeros[first:last],
            bias=None if self.bias is None else self.bias[begin:padded_end],
            k_permutation=self.k_permutation,
        )


class LayerRegistry:
    """The loaded layers by name. Filled at start, read by every request."""

    def __init__(self, layers: Iterable[QuantizedLinear] = ()) -> None:
        self._by_name: dict[str, QuantizedLinear] = {}
        self._by_module: dict[str, list[str]] = {}
        for layer in layers:
            self.add(layer)

    def add(self, layer: QuantizedLinear) -> None:
        """Add one layer.

        Raises:
            ValueError: a layer of that full name is already there.
        """
        name = layer.spec.name
        if name in self._by_name:
            raise ValueError(f"layer {name!r} is loaded twice")
        self._by_name[name] = layer
        self._by_module.setdefault(layer.spec.module, []).append(name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[QuantizedLinear]:
        return iter(self._by_name.values())

    @property
    def models(self) -> list[str]:
        """Names of the loaded models, sorted."""
        return sorted({layer.spec.model for layer in self})

    def resolve(self, name: str) -> QuantizedLinear:
        """Return the layer called `name`: "<model>/<module>", or a module that one model has.

        Raises:
            InvalidRequest: several models have that module.
            UnknownLayer: none has; the text lists near matches.
        """
        layer = self._by_name.get(name)
        if layer is not None:
            return layer
        full_names = self._by_module.get(name, [])
        if len(full_names) == 1:
            return self._by_name[full_names[0]]
        if full_names:
            listed = ", ".join(sorted(full_names))
            raise InvalidRequest(f"layer {name!r} is in several models; ask for one of: {listed}")
        shown = name if len(name) <= 200 else name[:200] + "..."
        near = self._near(name)
        hint = f"near matches: {', '.join(near)}" if near else "ListLayers names all layers"
        raise UnknownLayer(f"no layer is called {shown!r}; {hint}")

    def _near(self, name: str) -> list[str]:
        """Return up to three names that `name` may have been meant to be.

        Names that begin and end alike are looked at closely, the others not at all: comparing with
        each of a large model's layers would hold up the event loop for tens of milliseconds.
        """
        if len(name) > 200:
            return []

        def alike(first: str, second: str) -> int:
            # Written for paths, but it does compare letters, in C's time.
            return len(commonprefix([first, second]))  # noqa: RUF071

        def likeness(known: str) -> int:
            return alike(name, known) + alike(name[::-1], known[::-1])

        known = itertools.chain(self._by_name, self._by_module)
        return difflib.get_close_matches(name, heapq.nlargest(20, known, key=likeness), n=3)
