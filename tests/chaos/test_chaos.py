"""What CI runs of the chaos suite: 2 x 10^4 calls. `make chaos` runs any number of them."""

import asyncio
import random
from pathlib import Path

import pytest
from chaos.run import Part, print_part

CALLS = 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parity", [0, 1], ids=["batch-invariant", "as it is"])
def test_every_call_has_one_end_and_every_answer_is_right(parity: int, tmp_path: Path) -> None:
    """A new seed each time: what it finds once, it finds again with the seed that it prints."""
    part = Part(2 * random.randrange(10**6) + parity, CALLS, tmp_path)
    asyncio.run(part.run())
    print_part(part)
    assert not part.problems
    ends = part.ledger.ends
    # All that was meant to happen did.
    for kind, code in (
        ("plain", "OK"),
        ("stream", "OK"),
        ("cut", "UNAVAILABLE"),
        ("cancelled", "CANCELLED"),
        ("hasty", "DEADLINE_EXCEEDED"),
        ("poison", "INTERNAL"),
        ("bad", "INVALID_ARGUMENT"),
        ("plain", "RESOURCE_EXHAUSTED"),
    ):
        assert ends[kind, code], f"no {kind} call ended with {code}"
    assert part.notes["killed clients"]
