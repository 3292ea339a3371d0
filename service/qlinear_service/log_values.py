"""Values in log lines of the form `event=name key=value key=value`.

Names come from files and folders and may hold anything; a line must still split into its keys.
"""

import json
import re

__all__ = ["printable", "quoted"]

_PLAIN = re.compile(r"[!#-<>-~]+")  # visible ASCII without the double quote and "="


def quoted(value: object) -> str:
    """Return `value` as text that stands behind a "=": as it is, or as a JSON string in ASCII."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def printable(text: str) -> str:
    """Return `text` with "?" for each character that a terminal would obey or cannot show."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
