"""What is sent, and when: both follow from the seed alone, so a run can be replayed.

`Traffic` draws which layer, how many rows, which dtype and which of a few payloads; `arrivals`
draws the instants of a Poisson process; `Payloads` holds the activations.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlinear_service.errors import ConfigError

try:
    import ml_dtypes
except ImportError:  # only bfloat16 traffic needs it
    ml_dtypes = None  # type: ignore[assignment]

__all__ = ["PAYLOADS", "Payloads", "Request", "Traffic", "arrivals"]

PAYLOADS = 4
"""Different activations for each layer, number of rows and dtype."""

DISTINCT_ROWS = 1021
"""Rows drawn for each k; larger payloads repeat them. A prime, so that no power of two of rows
lands on itself and an answer with rows out of place is seen."""


@dataclass(frozen=True, slots=True, order=True)
class Request:
    """All that determines what one call sends, and so its right answer."""

    layer: str
    rows: int
    dtype: str
    """float16, bfloat16 or float32."""
    payload: int
    """0 to PAYLOADS - 1."""


class Traffic:
    """An endless sequence of requests, each kind as likely as any other.

    Args:
        layers: full names.
        rows: rows of a call.
        dtypes: dtypes of a call.
        seed: of the sequence.
    """

    def __init__(
        self, *, layers: Sequence[str], rows: Sequence[int], dtypes: Sequence[str], seed: int
    ) -> None:
        self._choices = (layers, rows, dtypes, range(PAYLOADS))
        self._seed = seed

    def __iter__(self) -> Iterator[Request]:
        # A string seeds the whole state and keeps this sequence apart from that of `arrivals`.
        draw = random.Random(f"requests {self._seed}")
        while True:
            yield Request(*(draw.choice(values) for values in self._choices))  # type: ignore[arg-type]


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the instants, in seconds from 0, of a Poisson process of `rate` per second."""
    draw = random.Random(f"arrivals {seed}")
    now = 0.0
    while True:
        now += draw.expovariate(rate)
        yield now


class Payloads:
    """The activations of every request, as views of one array for each k and dtype.

    Args:
        k_of: input features of each layer, by full name.
        max_rows: the most rows that a request has.
        dtypes: the dtypes that requests have.
        seed: of the values, which are normal with mean 0 and variance 1.

    Raises:
        ConfigError: bfloat16 without ml_dtypes.
    """

    def __init__(
        self, *, k_of: Mapping[str, int], max_rows: int, dtypes: Sequence[str], seed: int
    ) -> None:
        self._k_of = dict(k_of)
        self._arrays: dict[tuple[int, str], npt.NDArray[Any]] = {}
        height = max_rows + PAYLOADS - 1
        for k in sorted(set(k_of.values())):
            draw = np.random.default_rng([seed, k])
            rows = draw.standard_normal((min(height, DISTINCT_ROWS), k), dtype=np.float32)
            for dtype in dtypes:
                values = rows.astype(_numpy_dtype(dtype))
                self._arrays[k, dtype] = np.resize(values, (height, k))

    def __getitem__(self, request: Request) -> npt.NDArray[Any]:
        """Return x [rows, k]; neither copied nor to be changed."""
        array = self._arrays[self._k_of[request.layer], request.dtype]
        return array[request.payload : request.payload + request.rows]


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    if ml_dtypes is None:
        raise ConfigError("bfloat16 traffic needs ml_dtypes: pip install 'qlinear[bf16]'")
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
