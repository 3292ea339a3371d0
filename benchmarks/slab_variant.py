"""How `qlinear bench slab` is told of ways of having batches in flight on a GPU."""

import re
from typing import NamedTuple

from qlinear_service.gpu import direct

FORM = "STAGES[:SPARE][:urgent][:BLOCKS][:two][:light][:lanes]"


class Variant(NamedTuple):
    """One way of having batches in flight."""

    stages: int
    spare: int = 0
    """Multiprocessors that products leave alone."""
    urgent_rows: bool = False
    """Kernels that move rows go first."""
    blocks: int | None = None
    """Of those kernels, both together, unless a batch is alone; 0: as many as they take; None: as
    many as multiprocessors are left to them."""
    spinning: int = 1
    """Threads: who sends batches sees how they end, or two share that."""
    is_light: bool = False
    """As servers do, few batches are timed and long results go out by the copy engine."""
    lanes: int = 1
    """Streams that products take in turn."""

    @classmethod
    def read(cls, text: str) -> "Variant":
        """Return what a text of the form FORM says."""
        numbers, words = r"(\d+)(?::(\d+))?(:urgent)?(?::(\d+))?", "(:two)?(:light)?(:lanes)?"
        found = re.fullmatch(numbers + words, text)
        if found is None:
            raise ValueError(f"{text!r} is no variant; expected {FORM}")
        stages, spare, urgent, blocks, two, light, lanes = found.groups()
        return cls(
            stages=int(stages),
            spare=int(spare or 0),
            urgent_rows=bool(urgent),
            blocks=None if blocks is None else int(blocks),
            spinning=1 if two is None else 2,
            is_light=bool(light),
            lanes=1 if lanes is None else 2,
        )

    def __str__(self) -> str:
        blocks = "" if self.blocks is None else f":{self.blocks}"
        more = blocks + ":two" * (self.spinning == 2) + ":light" * self.is_light
        more += ":lanes" * (self.lanes == 2)
        return f"{self.stages}:{self.spare}" + ":urgent" * self.urgent_rows + more


STANDARD = Variant(
    direct.STAGES,
    direct.SPARE,
    spinning=direct.SPINNING,
    is_light=direct.TIMED_EACH > 1,
    lanes=direct.LANES,
)
"""What the server does."""
