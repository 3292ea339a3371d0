"""What a ledger asks of a queue, answered for the native one: who waits, who has begun, who left.

An item is held from its descriptor to the native side's last word on it. Event loop only.
"""

from collections.abc import Sequence

from qlinear_service.batching import Dropped
from qlinear_service.dispatch.abi import NEVER, Flag
from qlinear_service.dispatch.native import NativeDispatch
from qlinear_service.refusals import check_rows
from qlinear_service.slots import Slab
from qlinear_service.work import WorkItem

__all__ = ["NativeQueue"]

MOST_NAME = 128
"""Of a client's name, as in fairness.py."""

KEY_MASK = (1 << 64) - 1


class NativeQueue:
    """The native queue, with the names of Python.

    Args:
        native: the dispatcher.
        layers: full names, by the numbers that it has for them.
        row_bytes: of one element's row of results, by full name: output features.
        slab: where activations lie, and results may.
        max_queue_rows: most rows that wait.
    """

    def __init__(
        self,
        native: NativeDispatch,
        *,
        layers: Sequence[str],
        features: Sequence[int],
        slab: Slab,
        max_queue_rows: int,
    ) -> None:
        self._native = native
        self._numbers = {name: number for number, name in enumerate(layers)}
        self._features = dict(zip(layers, features, strict=True))
        self._slab = slab
        self._max_queue_rows = max_queue_rows
        self._held: set[int] = set()
        self._dropped: list[Dropped] = []
        self._rows_in = 0
        self._rows_in_by_layer = dict.fromkeys(layers, 0)

    def __contains__(self, item: WorkItem) -> bool:
        return item.sequence in self._held

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return self._rows_in - self._native.rows_left()

    def rows_by_layer(self) -> dict[str, int]:
        """Return the rows that wait for each layer that was ever asked for; from any thread."""
        entered, left = self._rows_in_by_layer, self._native.rows_left
        return {
            name: max(0, rows - left(self._numbers[name])) for name, rows in entered.items() if rows
        }

    def check_room(self, rows: int) -> None:
        """Raise Overloaded unless `rows` more may wait."""
        check_rows(self.rows, rows, self._max_queue_rows)

    def admit(self, items: Sequence[WorkItem]) -> None:
        """Let all `items` of one call wait, or none.

        Raises:
            Overloaded: they have more rows than there is room for.
        """
        rows = 0
        for item in items:
            rows += item.rows
        self.check_room(rows)
        described = []
        for place, item in enumerate(items, start=1):
            key = item.key
            flags = Flag.CALL_GOES_ON if place < len(items) else 0
            result_bytes = item.rows * self._features[key.layer] * key.output_dtype.itemsize
            if self._slab.room_for_result(item.slot, result_bytes):
                flags |= Flag.RESULT_FITS
            described.append(
                (
                    item.sequence,
                    item.slot.generation,
                    hash(item.client[:MOST_NAME]) & KEY_MASK,
                    item.enqueued_at,
                    NEVER if item.deadline is None else item.deadline,
                    item.slot.index,
                    self._numbers[key.layer],
                    item.rows,
                    item.nbytes,
                    item.priority,
                    key.x_dtype,
                    key.output_dtype,
                    flags,
                )
            )
            self._held.add(item.sequence)
            self._rows_in_by_layer[key.layer] += item.rows
        self._rows_in += rows
        self._native.submit(described)

    def result_bytes(self, item: WorkItem) -> int:
        """Return what the results of an item take."""
        return item.rows * self._features[item.key.layer] * item.key.output_dtype.itemsize

    def cancel(self, item: WorkItem) -> None:
        """Take `item` out, or what of it has not begun to run; nothing happens if none waits."""
        if item.sequence in self._held and self._native.cancel(item.sequence):
            self._held.discard(item.sequence)

    def has_begun(self, item: WorkItem) -> bool:
        """Say whether any row of `item` has been handed out, or it left in another way."""
        return item.sequence not in self._held or self._native.has_begun(item.sequence)

    def left(self, sequence: int) -> None:
        """Note the native side's last word on an item."""
        self._held.discard(sequence)

    def drop(self, dropped: Dropped) -> None:
        """Note an item that the native side has dropped."""
        self._dropped.append(dropped)

    def expire(self, now: float) -> list[Dropped]:
        """Return what was dropped since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped
