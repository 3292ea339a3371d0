"""Where finished calls are counted: the series of a layer, found by the name that a call wrote.

Names that are known are remembered with their series, so that a call looks nothing up; all others
are one. Knows the families by name and no time.
"""

from collections import Counter
from collections.abc import Mapping

from qlinear_service.measured import MeasuredLayer
from qlinear_service.metric_families import Family, Histogram, Number

__all__ = ["NO_LAYER", "UNKNOWN_LAYER", "CallSeries"]

UNKNOWN_LAYER = "unknown"
"""Label of calls for layers that are not loaded; no full name is that, as those hold a "/"."""

NO_LAYER = "none"
"""Label of calls of methods that have no layer."""


class CallSeries:
    """Series of calls by method, name and status.

    Args:
        families: where they live.
    """

    def __init__(self, families: Mapping[str, Family]) -> None:
        self._families = families
        self._full_names: dict[str | None, str] = {None: NO_LAYER}  # as calls write them -> full
        self._shapes: dict[str, str] = {}  # by full name
        self.numbers: dict[tuple[str, str | None, str], Number] = {}
        """Those of names that are known."""
        self.answers: dict[tuple[str, str], tuple[Number, Histogram]] = {}
        """Of calls for one layer that were answered: their count, and their times."""

    def know(self, layers: Mapping[str, MeasuredLayer]) -> None:
        """Learn the names of the loaded layers, by full name; bare ones where they are unique."""
        modules = Counter(layer.spec.module for layer in layers.values())
        for name, layer in layers.items():
            self._shapes[name] = layer.spec.shape
            self._full_names[name] = name
            if modules[layer.spec.module] == 1:
                self._full_names.setdefault(layer.spec.module, name)

    def number(self, method: str, name: str | None, code: str) -> Number:
        """Return the counter of calls for a layer; None is that of calls without one."""
        number = self.numbers.get((method, name, code))
        if number is None:
            full_name = self._full_names.get(name, UNKNOWN_LAYER)
            number = self._families["qlinear_requests_total"].number(method, full_name, code)
            if name in self._full_names:
                self.numbers[method, name, code] = number
        return number

    def answer(self, method: str, name: str) -> tuple[Number, Histogram]:
        """Return where answered calls for a loaded layer are counted."""
        answer = self.answers.get((method, name))
        if answer is None:
            shape = self._shapes[self._full_names[name]]
            histogram = self._families["qlinear_request_seconds"].histogram(method, shape)
            answer = self.answers[method, name] = self.number(method, name, "OK"), histogram
        return answer
