"""Answers kept during a run, and the comparison of them with other answers afterwards.

Checking waits until the load is over: computing references meanwhile would take the processor
from the very calls that are timed.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlinear_service.loadgen.traffic import Request

__all__ = ["Sample", "Samples", "Verdict", "compare_repeated"]

MOST_BYTES = 128 << 20
"""Of all answers kept, whatever number was asked for."""

REPEAT_TOLERANCE = 1 / 64
"""Of the largest element of a row. Another batch may add up in another order: k products in float32
err by k 2**-24 sum |x w|, and sum |x w| is about sqrt(k) times a typical result, so 1/64 holds for
k up to 4096 in the worst case; one unit in the last place of bfloat16 is 1/128. Rows that were
mixed up differ by about their own size."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    request: Request
    y: npt.NDArray[Any]


@dataclass(slots=True)
class Verdict:
    """What the comparison of all samples came to."""

    against: str
    """What answers were compared with."""
    checked: int = 0
    same_bits: int = 0
    """Of those checked: equal in every bit."""
    wrong: int = 0
    """Of those checked: further off than rounding explains."""
    not_checked: int = 0
    """Kept, but there was nothing to compare with."""
    first_problem: str = ""

    def add(self, sample: Sample, *, same_bits: bool, problem: str) -> None:
        """Count one comparison; an empty problem means that the answer is right."""
        self.checked += 1
        self.same_bits += same_bits
        if problem:
            self.wrong += 1
            request = sample.request
            self.first_problem = self.first_problem or (
                f"{request.layer}, {request.rows} rows, {request.dtype}: {problem}"
            )


class Samples:
    """A fair choice among all answers of a run, in bounded memory (reservoir sampling).

    Args:
        most: how many to keep.
        largest_bytes: bytes of the largest answer.
        seed: of the choice.
    """

    def __init__(self, *, most: int, largest_bytes: int, seed: int) -> None:
        self._most = min(most, max(MOST_BYTES // max(largest_bytes, 1), 1))
        self._draw = random.Random(f"samples {seed}")
        self._offered = 0
        self.kept: list[Sample] = []

    def offer(self, request: Request, y: npt.NDArray[Any]) -> None:
        """Keep this answer, perhaps; each one offered is as likely to be among those kept."""
        self._offered += 1
        if len(self.kept) < self._most:
            self.kept.append(Sample(request, y))
            return
        place = self._draw.randrange(self._offered)
        if place < self._most:
            self.kept[place] = Sample(request, y)


def compare_repeated(
    verdict: Verdict, sample: Sample, again: npt.NDArray[Any], *, batch_invariant: bool
) -> None:
    """Compare an answer from under load with the answer to the same request sent alone.

    Args:
        verdict: is told.
        sample: from under load.
        again: the later answer.
        batch_invariant: the server promises the same bits in any batch.
    """
    if sample.y.shape != again.shape or sample.y.dtype != again.dtype:
        problem = f"{sample.y.dtype} {list(sample.y.shape)}, then {again.dtype} {list(again.shape)}"
        verdict.add(sample, same_bits=False, problem=problem)
        return
    same = sample.y.tobytes() == again.tobytes()
    problem = "" if same else _drift(sample.y, again)
    if batch_invariant and not same and not problem:
        problem = "other bits than alone, though the server says that it is batch_invariant"
    verdict.add(sample, same_bits=same, problem=problem)


def _drift(y: npt.NDArray[Any], again: npt.NDArray[Any]) -> str:
    """Return what is beyond the tolerance between two answers, "" if nothing is."""
    one, other = y.astype(np.float32), again.astype(np.float32)
    scale = np.abs(np.nan_to_num(other, posinf=0, neginf=0)).max(axis=-1, keepdims=True)
    equal = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):  # inf - inf where both are equal
        far = ~equal & ~(np.abs(one - other) <= REPEAT_TOLERANCE * scale)
    if not far.any():
        return ""
    place = tuple(int(index) for index in np.argwhere(far)[0])
    return (
        f"y{list(place)} was {one[place]:g} and is {other[place]:g} when sent alone; "
        f"{int(far.sum())} of {far.size} elements are off"
    )
