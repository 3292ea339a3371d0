"""JSON objects read strictly: a name that stands twice is an error, not "the last one wins".

Configuration files, shard indexes and safetensors headers all pass through here, so that every
damaged one ends in one sentence that names the file.
"""

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from qlinear_service.errors import CheckpointError

__all__ = ["parse_object", "read_object"]

# The largest real index (thousands of shards' tensors) is a few MB; more is no configuration.
MAX_FILE_BYTES = 64 << 20


class _DuplicateName(ValueError):
    """Carries the name that stands twice in one object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _DuplicateName(next(name for name, count in counts.items() if count > 1))
    return result


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in `text`; `path` is only named in errors.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, or a name stands twice.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            path, f"is not UTF-8 text (byte {error.start}); expected a JSON object"
        ) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            path,
            f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "the file is damaged or incomplete",
        ) from None
    except _DuplicateName as error:
        raise CheckpointError(
            path, "the name stands twice in one JSON object; expected once", tensor=str(error)
        ) from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of absurd length
        raise CheckpointError(path, f"cannot be read as JSON: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"holds a JSON {type(value).__name__}; expected an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that the file at `path` holds.

    Raises:
        CheckpointError: it cannot be read, is too large, or breaks a rule of `parse_object`.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for whoever writes into it
            raise CheckpointError(path, "is not a regular file; expected a JSON file")
        if found.st_size > MAX_FILE_BYTES:
            raise CheckpointError(
                path, f"has {found.st_size} bytes; expected at most {MAX_FILE_BYTES}"
            )
        return parse_object(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
