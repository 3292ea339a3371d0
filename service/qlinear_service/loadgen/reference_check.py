"""Compares answers kept during a run with the truth computed from the model's own files.

The only module of this package that needs torch; `qlinear load` imports it for --check alone.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import reference
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerSpec, QuantizedLinear
from qlinear_service.loadgen.samples import Sample, Verdict
from qlinear_service.loadgen.traffic import Payloads
from qlinear_service.models import ModelSource, discover

__all__ = ["ReferenceFiles"]

HALF_UNIT = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8, DType.F32: 2.0**-24}
"""Largest relative error of one rounding to nearest."""


class ReferenceFiles:
    """The files that the server is said to serve.

    Args:
        path: a packed file, a checkpoint folder, or a folder of several models.

    Raises:
        CheckpointError: there is no model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sources: list[ModelSource] = discover(path)

    def require(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Check, from headers alone, that the files hold these layers.

        Args:
            shapes: n and k by full name, as the server tells them.

        Raises:
            CheckpointError: a layer is missing or has another shape.
        """
        specs: dict[str, LayerSpec] = {s.name: s for source in self._sources for s in source.specs}
        for name, (n, k) in shapes.items():
            spec = specs.get(name)
            if spec is None:
                raise CheckpointError(
                    self._path, f"holds no layer {name!r}, which the server serves; name its model"
                )
            if (spec.n, spec.k) != (n, k):
                raise CheckpointError(
                    self._path,
                    f"layer {name!r} has n={spec.n} k={spec.k}, and the server's n={n} k={k}",
                )

    def check(self, samples: Sequence[Sample], payloads: Payloads) -> Verdict:
        """Return how the answers compare with the exact ones; loads one layer at a time."""
        by_layer: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            by_layer[sample.request.layer].append(sample)
        verdict = Verdict(against=f"the exact result from {self._path}")
        for source in self._sources:
            for layer in source.load_layers():
                for sample in by_layer[layer.spec.name]:
                    x = payloads[sample.request].astype(np.float32)
                    _compare(verdict, layer, torch.from_numpy(x), sample)
        return verdict


def _compare(verdict: Verdict, layer: QuantizedLinear, x: torch.Tensor, sample: Sample) -> None:
    """Compare one answer, element by element, within what rounding can explain.

    Summing k products in float32 in any order errs by at most k 2^-24 sum |x w| (Higham, Accuracy
    and Stability of Numerical Algorithms, 4.2); one such term more for the bias; then the result is
    rounded once. 2^-25 is half the smallest subnormal of float16.
    """
    spec, dtype = layer.spec, DType.from_text(sample.request.dtype)
    if sample.y.shape != (x.shape[0], spec.n) or sample.y.dtype.name != dtype.text:
        problem = f"is {sample.y.dtype} {list(sample.y.shape)}; expected n={spec.n}"
        verdict.add(sample, same_bits=False, problem=problem)
        return
    x = x.to(to_torch(dtype))
    exact = reference.linear(layer, x, output_dtype=DType.F32, precision=torch.float64)
    y = torch.from_numpy(sample.y.astype(np.float32))
    rounded = exact.to(to_torch(dtype)).float()
    total = x.double().abs() @ reference.dequantize(layer).double().abs().T
    if layer.bias is not None:
        total += layer.bias[: spec.n].double().abs()
    bound = (spec.k + 2) * 2**-24 * total + (HALF_UNIT[dtype] + 2**-24) * exact.double().abs()
    equal = (y == rounded) | (y.isnan() & rounded.isnan())
    wrong = ~equal & ~((y.double() - exact.double()).abs() <= bound + 2**-25)
    problem = ""
    if wrong.any():
        row, column = (int(index) for index in wrong.nonzero()[0])
        problem = (
            f"y[{row}, {column}] is {float(y[row, column]):g}, expected "
            f"{float(exact[row, column]):g} within {float(bound[row, column]):g}; "
            f"{int(wrong.sum())} of {wrong.numel()} elements are off"
        )
    verdict.add(sample, same_bits=bool(equal.all()), problem=problem)
