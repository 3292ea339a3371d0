"""What one call of the chaos suite asks for, drawn at random, and whether its answer is right."""

import random
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from chaos.truth import DTYPES, POISON, POOL_ROWS, Array, Truth, numbers_from

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.dtypes import DType

ROWS = ((1, 1, 50), (2, 8, 25), (9, 64, 20), (65, 300, 4), (600, 850, 1))
"""Fewest and most rows, and how often so many are asked for."""


@dataclass(frozen=True)
class Request:
    """One call: `layers` has one name or several."""

    layers: tuple[str, ...]
    numbers: Array
    x: Array
    x_dtype: DType
    y_dtype: DType | None
    priority: int

    def message(self) -> pb.MatMulRequest:
        """Return it as it goes over the wire."""
        names: dict[str, Any] = {"layers": self.layers}
        if len(self.layers) == 1:
            names = {"layer": self.layers[0]}
        tensor = pb.Tensor(dtype=self.x_dtype.value, shape=self.x.shape, data=self.x.tobytes())
        output = 0 if self.y_dtype is None else self.y_dtype.value
        return pb.MatMulRequest(x=tensor, output_dtype=output, priority=self.priority, **names)

    def arguments(self, draw: random.Random) -> tuple[Any, Any]:
        """Return layers and x as a user of the client hands them over: any kind, any shape."""
        x: Any = self.x
        if len(x) % 2 == 0 and draw.random() < 0.3:
            x = x.reshape(2, len(x) // 2, x.shape[-1])
        if draw.random() < 0.3:
            x = to_torch(x)
        return self.layers[0] if len(self.layers) == 1 else list(self.layers), x


def draw_request(draw: random.Random, truth: Truth) -> Request:
    """Return one that is right."""
    names = list(truth.layers)
    layers = [draw.choice(names)]
    if draw.random() < 0.15:
        k = truth.layers[layers[0]].spec.k
        alike = [name for name in names if truth.layers[name].spec.k == k]
        layers = draw.choices(alike, k=draw.randint(2, 4))
    (least, most, _), *_ = draw.choices(ROWS, [weight for *_, weight in ROWS])
    numbers = numbers_from(draw.randrange(POOL_ROWS), draw.randint(least, most))
    x_dtype = draw.choice(tuple(DTYPES))
    return Request(
        layers=tuple(layers),
        numbers=numbers,
        x=truth.rows(layers[0], x_dtype, numbers),
        x_dtype=x_dtype,
        y_dtype=draw.choice(tuple(DTYPES)) if draw.random() < 0.3 else None,
        priority=draw.choice((0, 0, 0, 1, 9)),
    )


def poison(request: Request, draw: random.Random) -> None:
    """Make the computation of one of its rows fail."""
    request.x[draw.randrange(len(request.x)), 0] = POISON


def problem_of(request: Request, answers: Any, truth: Truth, *, same_bits: bool) -> str:
    """Return what is wrong with the answers of a client or of a message, "" if nothing is."""
    if isinstance(answers, pb.MatMulResponse):
        ys = [from_message(tensor) for tensor in answers.y]
    else:
        ys = [to_numpy(y) for y in (answers if isinstance(answers, list) else [answers])]
    if len(ys) != len(request.layers):
        return f"{len(ys)} results for {request.layers}"
    for layer, y in zip(request.layers, ys, strict=True):
        flat = y.reshape(-1, y.shape[-1])
        wanted = DTYPES[request.y_dtype or request.x_dtype]
        problem = "" if flat.dtype == wanted else f"is {flat.dtype}; expected {wanted}"
        problem = problem or truth.problem(
            layer, request.x_dtype, flat, request.numbers, same_bits=same_bits
        )
        if problem:
            return f"{layer}, {len(request.x)} rows of {request.x_dtype.name}: {problem}"
    return ""


def from_message(tensor: pb.Tensor) -> Array:
    """Return a message's tensor."""
    dtype = DTYPES[DType(tensor.dtype)]
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tuple(tensor.shape))


def to_torch(x: Array) -> torch.Tensor:
    """Return `x` as a tensor; torch reads no bfloat16 of numpy."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(y: Any) -> Array:
    """Return an answer of either library as an array."""
    if not isinstance(y, torch.Tensor):
        return y  # type: ignore[no-any-return]
    if y.dtype == torch.bfloat16:
        return y.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return y.numpy()
