"""How an option is declared: a field of a frozen dataclass with its text and its bounds.

Knows no option: they are declared in `config.py`, by the group that owns them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from qlinear_service.errors import ConfigError

__all__ = ["Group", "OptionError", "computed_option", "one_of", "option"]

T = TypeVar("T")


class OptionError(ConfigError):
    """One option has a value that cannot be used.

    Args:
        option: its name, as in the TOML file.
        problem: one sentence with the value and the rule.
    """

    def __init__(self, option: str, problem: str) -> None:
        self.option = option
        self.problem = problem
        super().__init__(f"{option}: {problem}")


def option(
    default: T,
    doc: str,
    *,
    name: str = "",
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    """Return a field with a default.

    Args:
        default: its value.
        doc: its help.
        name: what files call it, if not as the field.
        unit: what its help calls a value, if not as the last word of the field's name.
        minimum: the least that is allowed.
        maximum: the most.
    """
    bounds = {"minimum": minimum, "maximum": maximum}
    return field(default=default, metadata={"doc": doc, "name": name, "unit": unit, **bounds})


def one_of(known: Sequence[str]) -> str:
    """Return what help calls a value that is one of these."""
    return f"{{{','.join(known)}}}"


def computed_option(
    factory: Callable[[], T],
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    """Return a field whose default depends on the machine."""
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum}
    return field(default_factory=factory, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Options with one owner; refuses values out of bounds when it is made."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value: Any = getattr(self, item.name)
            minimum, maximum = item.metadata.get("minimum"), item.metadata.get("maximum")
            low = minimum is not None and not value >= minimum
            high = maximum is not None and not value <= maximum
            if low or high:
                rule = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
                name = item.metadata.get("name") or item.name
                raise OptionError(name, f"is {value}; expected {rule}")
