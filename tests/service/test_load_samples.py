"""Answers kept by the load generator and their comparison with later ones."""

from typing import Any

import numpy as np

from qlinear_service.loadgen.samples import Sample, Samples, Verdict, compare_repeated
from qlinear_service.loadgen.traffic import Request

ONE = Request("m/a", 2, "float16", 0)


def test_samples_are_a_fair_choice_in_bounded_memory() -> None:
    samples = Samples(most=100, largest_bytes=8, seed=1)
    for number in range(10_000):
        samples.offer(ONE, np.array([number]))
    kept = [int(sample.y[0]) for sample in samples.kept]
    assert len(set(kept)) == 100
    assert 4000 < np.mean(kept) < 6000
    assert len(Samples(most=100, largest_bytes=1 << 30, seed=1).kept) == 0
    large = Samples(most=100, largest_bytes=64 << 20, seed=1)
    for number in range(50):
        large.offer(ONE, np.array([number]))
    assert len(large.kept) == 2


def repeated(y: Any, again: Any, *, batch_invariant: bool = False) -> Verdict:
    verdict = Verdict(against="the same call")
    compare_repeated(verdict, Sample(ONE, y), again, batch_invariant=batch_invariant)
    return verdict


def test_repeated_answers() -> None:
    y = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float16)
    same = repeated(y, y.copy())
    assert (same.same_bits, same.wrong, same.first_problem) == (1, 0, "")
    last_place = np.nextafter(y, np.float16(np.inf))
    assert (repeated(y, last_place).same_bits, repeated(y, last_place).wrong) == (0, 0)
    strict = repeated(y, last_place, batch_invariant=True)
    assert strict.wrong == 1
    assert "batch_invariant" in strict.first_problem
    for other in (y[::-1], y[:2], y.astype(np.float32), np.where(y > 2, np.float16(np.nan), y)):
        verdict = repeated(y, other)
        assert verdict.wrong == 1, verdict
        assert verdict.first_problem.startswith("m/a, 2 rows, float16: ")


def test_infinite_and_missing_numbers_equal_themselves() -> None:
    y = np.array([[np.inf, np.nan, -np.inf, 1]], np.float32)
    again = np.array([[np.inf, -np.nan, -np.inf, 1]], np.float32)
    assert repeated(y, again).wrong == 0
    assert repeated(y, -y).wrong == 1
