"""Trace context as it arrives: which `traceparent` texts are one, and which are ignored.

Nothing here traces. What is valid travels with the work item to where batches are formed.
"""

import re

__all__ = ["valid_traceparent"]

# https://www.w3.org/TR/trace-context/: version-trace_id-parent_id-flags, lower-case hex, no id
# all zeros, no version ff. Version 00 ends there; later ones may append more after a dash.
_FORM = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-[!-~]*)?",
)
MAX_LENGTH = 512


def valid_traceparent(text: str) -> str | None:
    """Return `text` if it is a W3C traceparent, None if it is to be ignored."""
    if not text or len(text) > MAX_LENGTH:
        return None
    match = _FORM.fullmatch(text)
    if match is None or (text.startswith("00") and match["more"] is not None):
        return None
    return text
