"""Log lines: one for each event, `event=name key=value key=value` or JSON, as the server is told.

Names come from files and folders and may hold anything; a line must still split into its keys, and
be one line. What a value is, its caller decides: never activations, nor results.
"""

import json
import logging
import math
import re
import time
from typing import Any

__all__ = ["FORMATS", "JsonFormatter", "LineFormatter", "event", "printable", "quoted"]

_PLAIN = re.compile(r"[!#-<>-~]+")  # visible ASCII without the double quote and "="


def event(
    logger: logging.Logger,
    level: int,
    name: str,
    /,
    *,
    exc_info: Any = None,
    **values: object,
) -> None:
    """Log that `name` has happened, with its values in the order in which they are given."""
    if logger.isEnabledFor(level):
        text = " ".join([name, *(f"{key}={quoted(value)}" for key, value in values.items())])
        extra = {"event": name, "values": values}
        logger.log(level, text, exc_info=exc_info, extra=extra, stacklevel=2)


def quoted(value: object) -> str:
    """Return `value` as text that stands behind a "=": as it is, or as a JSON string in ASCII."""
    plain = _plain(value)
    text = str(plain).lower() if isinstance(plain, bool) else str(plain)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def printable(text: str) -> str:
    """Return `text` with "?" for each character that a terminal would obey or cannot show."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


class LineFormatter(logging.Formatter):
    """Makes `time=... level=... logger=... event=... key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        return " ".join(f"{key}={quoted(value)}" for key, value in _entries(self, record).items())


class JsonFormatter(logging.Formatter):
    """Makes the same as one JSON object; numbers and truth values stay what they are."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        return json.dumps(_entries(self, record))


FORMATS = {"text": LineFormatter, "json": JsonFormatter}


def _entries(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, object]:
    """Return what a line says, in order."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    entries: dict[str, object] = {
        "time": f"{moment}.{int(record.msecs):03d}Z",
        "level": record.levelname,
        "logger": record.name,
        # Of other packages' lines, which have no values: their text.
        "event": getattr(record, "event", None) or record.getMessage(),
    }
    values: dict[str, Any] = getattr(record, "values", {})
    entries |= {key: _plain(value) for key, value in values.items()}
    if record.exc_info and record.exc_info[0] is not None:
        entries["traceback"] = formatter.formatException(record.exc_info)
    return entries


def _plain(value: object) -> object:
    """Return `value` as JSON knows it; of an exception its text."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)  # JSON has no such
    return value if isinstance(value, int) else str(value)
