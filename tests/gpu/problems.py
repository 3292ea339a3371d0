"""Layers and activations on the device, and what their product is exactly.

Most tests use *exact problems*: x holds small integers and scales are powers of two, so every sum
that a kernel can form, in any order and any grouping, is a number that float32 holds. Then y has
one right value, bit for bit, and a single wrong code, scale, row or share of a sum shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerSpec, LogicalLayer, QuantizedLinear

SLAB_FEATURES = 4096
SMALLEST_SCALE = 2.0**-3
"""Sums are multiples of it; 2**24 of them, some two millions, are exact. Integers up to 2 times
differences up to 256 add up to less than a tenth of that at k = 74240, six deviations out."""

ZEROS = {4: (0, 15, 16, 7, 8, 1), 8: (0, 255, 128, 1, 127, 254)}
"""Zero points at both ends. 16 is what files of AutoGPTQ 0.7.1 hold; for 8 bits its like, 256, does
not fit the byte that a zero point is stored in."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a layer is besides its size."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    scale_dtype: DType = DType.F16
    bias: torch.dtype | None = None
    permuted: bool = False


FORMS = [
    Form(bits=bits, group_size=group_size, symmetric=symmetric)
    for bits in (4, 8)
    for group_size in (-1, 32, 64, 128)
    for symmetric in (True, False)
]
FEW_FORMS = [
    Form(),
    Form(bits=8, group_size=32, symmetric=False, scale_dtype=DType.F32),
    Form(group_size=-1, symmetric=False, scale_dtype=DType.BF16, bias=torch.float32),
    Form(bits=8, group_size=-1, bias=torch.float16),
    Form(group_size=64, scale_dtype=DType.F32, bias=torch.bfloat16),
    Form(bits=8, group_size=64, symmetric=False),
]


class Problem:
    """One layer on the device, in both forms.

    Args:
        device: where.
        n: output features.
        k: input features.
        form: the rest.
        exact: integers and powers of two, see above; else numbers of every kind.
        seed: of everything.
    """

    def __init__(
        self,
        device: torch.device,
        n: int,
        k: int,
        form: Form | None = None,
        *,
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        self.form = form = form or Form()
        self.device = device
        self.draw = torch.Generator(device).manual_seed(1000 * n + k + seed)
        spec = LayerSpec(
            model="gpu", module="layer", n=n, k=k, bits=form.bits, group_size=form.group_size,
            symmetric=form.symmetric, has_bias=form.bias is not None,
            scale_dtype=form.scale_dtype, has_k_permutation=form.permuted,
        )  # fmt: skip
        columns = (packing.stored_groups(spec), n)
        self.logical = LogicalLayer(
            spec=spec,
            codes=self._integers((k, n), 0, 2**form.bits - 1).to(torch.uint8),
            scales=self._scales(columns, exact).to(to_torch(form.scale_dtype)),
            zeros=None if form.symmetric else self._zeros(columns),
            bias=None if form.bias is None else self._integers((n,), -64, 64).to(form.bias),
            k_permutation=self._order(k) if form.permuted else None,
        )
        with device:  # what packing makes is made there
            self.layer: QuantizedLinear = packing.pack(self.logical)

    def _integers(self, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        kind = torch.int16 if high > 127 or low < -128 else torch.int8
        return torch.randint(
            low, high + 1, shape, generator=self.draw, dtype=kind, device=self.device
        )

    def _scales(self, shape: tuple[int, int], exact: bool) -> torch.Tensor:
        """Of both signs: symmetric AutoRound files hold negative ones."""
        if not exact:
            drawn = torch.randn(shape, generator=self.draw, device=self.device)
            return drawn * 2.0**-self.form.bits
        sizes = torch.exp2(self._integers(shape, -3, 0).float())
        return sizes * (1 - 2 * self._integers(shape, 0, 1).float())

    def _zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        values = torch.tensor(ZEROS[self.form.bits], device=self.device)
        return values[self._integers(shape, 0, len(values) - 1).long()].to(torch.uint8)

    def _order(self, k: int) -> torch.Tensor:
        return torch.randperm(k, generator=self.draw, device=self.device).int()

    def x(self, m: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """Return activations [m, k] that keep the problem exact."""
        return self._integers((m, self.logical.spec.k), -2, 2).to(dtype)

    def normal_x(self, m: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """Return activations [m, k] with every bit in use."""
        shape = (m, self.logical.spec.k)
        return torch.randn(shape, generator=self.draw, device=self.device).to(dtype)

    def weights(self, begin: int, end: int) -> torch.Tensor:
        """Return float64 [end - begin, k] of output features, in the order of x."""
        logical, spec = self.logical, self.logical.spec
        group = torch.arange(spec.k, device=self.device)
        group = group * 0 if spec.group_size == -1 else group // spec.group_size
        zeros: torch.Tensor | float = float(2 ** (spec.bits - 1))
        if logical.zeros is not None:
            zeros = logical.zeros[:, begin:end].double()[group]
        scales = logical.scales[:, begin:end].double()[group]
        weights = (logical.codes[:, begin:end].double() - zeros) * scales
        if logical.k_permutation is not None:
            unsorted = torch.empty_like(weights)
            unsorted[logical.k_permutation.long()] = weights
            weights = unsorted
        return weights.T

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of output features whose float64 weights fit beside everything else."""
        n = self.logical.spec.n
        yield from ((b, min(b + SLAB_FEATURES, n)) for b in range(0, n, SLAB_FEATURES))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return float64 [m, n], exact for exact problems."""
        parts = [x.double() @ self.weights(begin, end).T for begin, end in self.slabs()]
        y = torch.cat(parts, dim=1)
        if self.logical.bias is not None:
            y += self.logical.bias.double()
        return y


def assert_same(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare every bit but the sign of zero, NaN with NaN; say where the first difference is."""
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    wrong = ~((y == expected) | (y.isnan() & expected.isnan()))
    if wrong.any():
        places = wrong.nonzero()
        row, column = (int(i) for i in places[0])
        rows, columns = (places[:, axis].unique().tolist()[:12] for axis in (0, 1))
        raise AssertionError(
            f"{len(places)} of {y.numel()} are wrong; y[{row}, {column}] is "
            f"{float(y[row, column])}, expected {float(expected[row, column])}; "
            f"rows {rows}, columns {columns} ..."
        )
