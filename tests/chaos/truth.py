"""The activations that calls of the chaos suite send, and what every element of an answer may be.

Each row has a number, which stands in its first element: rows of one call follow each other, so
that the injected failures can tell calls apart, and no two rows have the same answer.
"""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch
from closeness import bound_of

from qlinear_service.dtypes import DType
from qlinear_service.kernels import reference
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear

POOL_ROWS = 256  # bfloat16 has eight bits: the number of each row is exact in every dtype
ROWS_PER_UNIT = 64
POISON = 512.0
"""First element of a row whose computation fails, always."""

DTYPES = {DType.F16: np.float16, DType.BF16: ml_dtypes.bfloat16, DType.F32: np.float32}
Array = np.ndarray[Any, Any]


@dataclass
class Bounds:
    """Of the answers to one layer for all rows of the pool, [POOL_ROWS, n] float32."""

    low: Array
    high: Array
    bits: Array
    """Of the first right answer that came for each row; compared with in batch-invariant mode."""
    seen: Array = field(default_factory=lambda: np.zeros(POOL_ROWS, dtype=bool))


class Truth:
    """What is right, for all calls of a run.

    Args:
        layers: that are served.
        seed: of the activations.
    """

    def __init__(self, layers: list[QuantizedLinear], seed: int) -> None:
        self.layers = {layer.spec.name: layer for layer in layers}
        self._pools: dict[tuple[int, DType], Array] = {}
        self._bounds: dict[tuple[str, DType, DType], Bounds] = {}
        for k in sorted({layer.spec.k for layer in layers}):
            rows = np.random.default_rng([seed, k]).standard_normal((POOL_ROWS, k))
            rows[:, 0] = np.arange(POOL_ROWS) / ROWS_PER_UNIT
            for dtype, numpy_dtype in DTYPES.items():
                self._pools[k, dtype] = rows.astype(numpy_dtype)

    def rows(self, layer: str, dtype: DType, numbers: Array) -> Array:
        """Return x [len(numbers), k], a copy."""
        return self._pools[self.layers[layer].spec.k, dtype][numbers]

    def forget_bits(self) -> None:
        """Let the next answers decide which bits are expected: the server may be another one."""
        for bounds in self._bounds.values():
            bounds.seen[:] = False

    def problem(
        self, layer: str, x_dtype: DType, y: Array, numbers: Array, *, same_bits: bool
    ) -> str:
        """Return what is wrong with an answer, "" if nothing is.

        Args:
            layer: full name.
            x_dtype: of the activations.
            y: the answer, [rows, n].
            numbers: of the rows that were sent.
            same_bits: every row must have the bits that it had in any other company.
        """
        y_dtype = next((own for own, other in DTYPES.items() if y.dtype == other), None)
        n = self.layers[layer].spec.n
        if y.shape != (len(numbers), n) or y_dtype is None:
            return f"is {y.dtype} {y.shape}; expected {(len(numbers), n)}"
        bounds = self._bounds_of(layer, x_dtype, y_dtype)
        values = y.astype(np.float32)
        # NaN is no right answer either.
        right = (values >= bounds.low[numbers]) & (values <= bounds.high[numbers])
        if not right.all():
            row, column = np.argwhere(~right)[0]
            number = numbers[row]
            return (
                f"y[{row}, {column}] of row {number} is {values[row, column]:g}; expected "
                f"{bounds.low[number, column]:g} to {bounds.high[number, column]:g}; "
                f"{int((~right).sum())} of {right.size} elements are off"
            )
        if same_bits:
            return self._bit_problem(bounds, y, numbers)
        return ""

    def _bit_problem(self, bounds: Bounds, y: Array, numbers: Array) -> str:
        bits = np.ascontiguousarray(y).view(bounds.bits.dtype)
        new = ~bounds.seen[numbers]
        bounds.bits[numbers[new]] = bits[new]
        bounds.seen[numbers] = True
        other = (bits != bounds.bits[numbers]).any(axis=1)
        if not other.any():
            return ""
        return f"{int(other.sum())} of {len(numbers)} rows have other bits than in other company"

    def _bounds_of(self, layer: str, x_dtype: DType, y_dtype: DType) -> Bounds:
        key = (layer, x_dtype, y_dtype)
        if key not in self._bounds:
            own = self.layers[layer]
            pool = self._pools[own.spec.k, x_dtype].astype(np.float32)
            x = torch.from_numpy(pool).to(to_torch(x_dtype))
            exact = reference.linear(own, x, output_dtype=DType.F32, precision=torch.float64)
            exact = exact.double()
            if x_dtype is DType.F32:
                x = x.to(to_torch(own.spec.compute_dtype))
            bound = bound_of(own, x, exact, y_dtype)
            width = np.uint32 if y_dtype is DType.F32 else np.uint16
            self._bounds[key] = Bounds(
                low=(exact - bound).numpy(),
                high=(exact + bound).numpy(),
                bits=np.zeros(exact.shape, dtype=width),
            )
        return self._bounds[key]


def numbers_from(first: int, rows: int) -> Array:
    """Return the numbers of `rows` rows that follow each other in the pool, around its end."""
    return (first + np.arange(rows)) % POOL_ROWS
