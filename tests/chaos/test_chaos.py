"""What CI runs of the chaos suite: 2 x 10^4 calls. `make chaos` runs any number of them."""

import asyncio
import random
from pathlib import Path

import pytest
from chaos.pretended_gpu import build_fake, gathers
from chaos.run import Part, print_part

CALLS = 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parity", [0, 1], ids=["batch-invariant", "as it is"])
def test_every_call_has_one_end_and_every_answer_is_right(parity: int, tmp_path: Path) -> None:
    """A new seed each time: what it finds once, it finds again with the seed that it prints."""
    account(Part(2 * random.randrange(10**6) + parity, CALLS, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_dispatcher_of_a_gpu_keeps_the_same_account(tmp_path: Path) -> None:
    """On a GPU that is none; nothing else is pretended."""
    library = build_fake(tmp_path)
    account(Part(2 * random.randrange(10**6) + 1, CALLS, tmp_path, library))
    assert gathers(library) > 100


def account(part: Part) -> None:
    """Run a part and check that all had one end, and that all ends came."""
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
