"""One thing that was looked at, for people and for programs."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Finding", "State"]


class State(Enum):
    """How a finding bears on serving on the device that was asked for."""

    OK = "ok"
    NOTE = "note"
    """Serving goes on, without it or more slowly."""
    FAULT = "fault"
    """Serving is impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    text: str
    """One sentence: what was found and, where that is no good, what to do."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The same for programs."""
