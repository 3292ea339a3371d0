"""Whom our kernels are measured against, in the same run: cuBLAS through torch, and Humming.

Humming is the package `humming-kernels` from PyPI, which compiles its kernels when they are first
used; nothing of it is part of this project. It is imported only when it competes.
"""

import json
from typing import Any

import torch
from kernel_figures import Cell, Shape, Variant, copies_for, weight_bytes
from kernel_gpu import Call, Gpu
from kernel_layers import CHECKED_BLOCKS, Prepared, compare

from qlinear_service.kernels import layout
from qlinear_service.kernels.torch_types import to_torch

CUBLAS_LAYOUTS = ("nk", "kn")
LOCKS = 2048  # what HummingLayer itself gives each layer


class PeerMissing(Exception):
    """A peer is not installed, or does not run here; the text says which and why."""


class Cublas:
    """A float16 product through torch.mm; which of the two weight layouts is in the name."""

    def __init__(self, gpu: Gpu, order: str) -> None:
        self.name = f"cuBLAS {order}"
        self._gpu, self._order = gpu, order

    def prepare(self, cell: Cell, x: torch.Tensor, y: torch.Tensor) -> Prepared:
        """Return its calls in a cell; the better of both layouts counts."""
        k, n = cell.shape.k, cell.shape.n
        count = copies_for(2 * n * k)
        pieces = [
            piece.view(torch.float16) for piece in self._gpu.copies("dense", 2 * n * k, count)
        ]
        if self._order == "kn":
            weights = [piece.view(k, n) for piece in pieces]
        else:
            weights = [piece.view(n, k).T for piece in pieces]
        x16, y16 = x.to(torch.float16), y.view(torch.float16)

        def product(weight: torch.Tensor) -> Call:
            return lambda: torch.mm(x16, weight, out=y16)

        calls = [product(weight) for weight in weights]
        return Prepared(calls, error=None, wrong="", detail={"copies": count})


class Humming:
    """Humming's dense product with the plan that its own heuristics choose for each M.

    Weights stay unsigned codes: the signed form that it prefers exists only for layers that never
    use their smallest code, which real checkpoints do.

    Raises:
        PeerMissing: the package or something that it needs is not there.
    """

    name = "Humming"

    def __init__(self, gpu: Gpu) -> None:
        try:
            import humming
            from humming import dtypes, ops, schema, transform, tune
            from humming.kernel.humming import HummingKernel
        except Exception as error:  # whatever its import meets
            raise PeerMissing(f"not installed (pip install humming-kernels): {error}") from error
        self.version = humming.__version__
        self._dtypes, self._ops, self._schema = dtypes, ops, schema
        self._transform, self._tune, self._kernel = transform, tune, HummingKernel
        self._gpu = gpu
        self._locks = torch.zeros(LOCKS, dtype=torch.int32, device=gpu.device)
        self._layers: dict[tuple[Variant, Shape], _HummingLayer] = {}

    def config(self, shape: Shape, variant: Variant) -> Any:
        """Return its description of a layer."""
        dtype = to_torch(variant.dtype)
        weights = self._schema.HummingWeightSchema(
            b_dtype=self._dtypes.DataType.from_str(f"uint{variant.bits}"),
            bs_dtype=self._dtypes.DataType.from_torch_dtype(dtype),
            weight_scale_group_size=variant.group_size,
            has_zero_point=variant.has_zeros,
        )
        return self._transform.prepare_layer_config(
            shape_n=shape.n,
            shape_k=shape.k,
            weight_schema=weights,
            torch_dtype=dtype,
            device=self._gpu.device.index,
        )

    def tuning(self, config: Any, m: int) -> dict[str, Any]:
        """Return the plan that its heuristics choose."""
        found: dict[str, Any] = self._tune.get_heuristics_config(
            config, shape_m=m, device=self._gpu.device.index
        )
        return dict(found)

    def compile(self, cells: list[Cell]) -> None:
        """Compile the kernels of all cells at once, on as many cores as there are."""
        specs = []
        for cell in cells:
            config = self.config(cell.shape, cell.variant)
            values = json.loads(config.to_str()) | self.tuning(config, cell.m)
            values.pop("sublayer_name", None)
            values.pop("num_sms", None)  # of the launch, not of the kernel
            specs.append((self._kernel, values))
        self._kernel.compile_many(specs, self._gpu.device.index)

    def prepare(self, cell: Cell, x: torch.Tensor, y: torch.Tensor) -> Prepared:
        """Return its calls in a cell, after comparing its results with float64."""
        layer = self._layer(cell)
        tuning = self.tuning(layer.config, cell.m)
        kernels = self._kernel.prepare_kernels(
            layer.config.to_str(), None, [[0, cell.m, tuning]], self._gpu.device.index
        )

        def product(tensors: dict[str, torch.Tensor]) -> Call:
            return lambda: self._ops.launch_kernel(
                configs=kernels, inputs=x, outputs=y, locks=self._locks, **tensors
            )

        y.fill_(float("nan"))
        product(layer.known)()
        error, wrong = compare(cell, y, layer.places, x.double() @ layer.columns)
        count = copies_for(weight_bytes(cell.shape, cell.variant).total)
        calls = [product(copy) for copy in self._copies(layer, cell.variant, count)]
        detail = {"version": self.version, "plan": {k: str(v) for k, v in tuning.items()}}
        return Prepared(calls, error, wrong, detail)

    def _layer(self, cell: Cell) -> "_HummingLayer":
        """Return one layer of known weights; only the last one is kept."""
        key = (cell.variant, cell.shape)
        if key not in self._layers:
            self._layers.clear()
            self._layers[key] = self._new_layer(cell.shape, cell.variant)
        return self._layers[key]

    def _new_layer(self, shape: Shape, variant: Variant) -> "_HummingLayer":
        plain = PlainWeights(shape, variant, self._gpu.device)
        config = self.config(shape, variant)
        known = self._transform.transform_humming_tensors(config, plain.tensors())
        places = torch.randperm(shape.n, device=self._gpu.device)
        places = places[: CHECKED_BLOCKS * layout.TILE_N].sort().values
        return _HummingLayer(config, known, places, plain.columns(places))

    def _copies(
        self, layer: "_HummingLayer", variant: Variant, count: int
    ) -> list[dict[str, torch.Tensor]]:
        """Return distinct random layers in its own layout, in which every bit pattern is valid."""
        copies: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for name, tensor in layer.known.items():
            kind = variant.dtype.text if name == "weight_scale" else "bits"
            size = tensor.numel() * tensor.element_size()
            # Zero points lie behind the codes: a buffer of bits of their own.
            kind = "more bits" if name == "zero_point" else kind
            for copy, piece in zip(copies, self._gpu.copies(kind, size, count), strict=True):
                copy[name] = piece.view(tensor.dtype).view(tensor.shape)
        return copies


class _HummingLayer:
    """A layer of known weights in Humming's layout, and the true weights of some columns."""

    def __init__(
        self,
        config: Any,
        known: dict[str, torch.Tensor],
        places: torch.Tensor,
        columns: torch.Tensor,
    ) -> None:
        self.config, self.known = config, known
        self.places, self.columns = places, columns


class PlainWeights:
    """Random weights as checkpoints hold them: [n, k], codes along k in 32-bit words."""

    def __init__(self, shape: Shape, variant: Variant, device: torch.device) -> None:
        self.bits, self.group_size = variant.bits, variant.group_size
        self.per_word = 32 // variant.bits
        groups = shape.k // variant.group_size
        words = (shape.n, shape.k // self.per_word)
        self.weight = random_words(words, device)
        scales = torch.empty((shape.n, groups), dtype=to_torch(variant.dtype), device=device)
        self.scales = scales.uniform_(0.005, 0.015)
        self.zeros = None
        if variant.has_zeros:
            self.zeros = random_words((shape.n // self.per_word, groups), device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them under Humming's names."""
        tensors = {"weight": self.weight, "weight_scale": self.scales}
        return tensors if self.zeros is None else tensors | {"zero_point": self.zeros}

    def columns(self, places: torch.Tensor) -> torch.Tensor:
        """Return the weights of some output features, float64 [k, features]."""
        codes = unpack_words(self.weight[places], self.bits).double()
        zeros: torch.Tensor | float = float(1 << (self.bits - 1))
        if self.zeros is not None:
            by_group = unpack_words(self.zeros.T.contiguous(), self.bits)[:, places].T
            zeros = by_group.double().repeat_interleave(self.group_size, dim=1)
        scales = self.scales[places].double().repeat_interleave(self.group_size, dim=1)
        return ((codes - zeros) * scales).T


def random_words(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return random 32-bit words."""
    return torch.empty(shape, dtype=torch.int32, device=device).random_(-(2**31), 2**31)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of 32-bit words, lowest bits first: int32 [rows, words * codes per word]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(words.shape[0], -1)
