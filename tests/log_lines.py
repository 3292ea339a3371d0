"""Reads log lines of the form `key=value key="JSON string"` back into keys and values."""

import json
import re

PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "=]+)(?: |$)')


def split(line: str) -> dict[str, str]:
    """The keys and values of a line."""
    pairs = PAIR.findall(line)
    return {key: json.loads(value) if value[0] == '"' else value for key, value in pairs}
