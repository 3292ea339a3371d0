"""How many rows a batch of the native dispatcher may have: what it can send itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from qlinear_service.gpu.room import MOST_Y_BYTES, rows_of_batches
from qlinear_service.gpu.ways import TABLE_ROWS


def layer(k: int, n: int) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(k=k, n=n))


@pytest.mark.parametrize(
    ("layers", "asked", "rows"),
    [
        ([layer(4096, 28672)], 1024, 1024),
        ([layer(14336, 4096)], 1024, 1024),
        ([layer(4096, 4096)], 1 << 20, TABLE_ROWS),
        ([layer(4096, 4096)], 17, 17),
        ([layer(64, 64), layer(64, 152064)], 1024, MOST_Y_BYTES // (2 * 152064)),
        ([layer(1 << 26, 1 << 26)], 1024, 1),
        ([], 1024, 1024),
    ],
)
def test_all_that_is_formed_can_be_sent(layers: list[Any], asked: int, rows: int) -> None:
    """A slab fed at twice its capacity once formed batches with no room, which came back."""
    assert rows_of_batches(layers, asked) == rows
