"""The journal between the process that measures and the one that watches it.

A kernel that faults takes its whole process down, and one that waits for ever stops it. So the
measuring runs in a process of its own, which writes each step into a file before it begins and
each result when it has it; the watcher ends it when it is stuck, and starts another that goes on
behind the step at fault.
"""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_SECONDS = 45.0
"""A step that takes longer is stuck, unless it has said how long it may take."""
MOST_RESTARTS = 8
POLL_SECONDS = 0.1
TAIL_BYTES = 1 << 16
KILLED = -9
CONTEXT_LOST = 70
"""Exit code of a measuring process whose GPU context a kernel has destroyed."""
USAGE = 2


@dataclass
class Journal:
    """What is known so far, read from the file and added to it."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    _whole: bool = True
    """False: the file ends within a line."""

    def __post_init__(self) -> None:
        if self.path.exists():
            # A process that was killed may have left half a line.
            lines = self.path.read_text().splitlines(keepends=True)
            self.records = [json.loads(line) for line in lines if line.endswith("}\n")]
            self._whole = not lines or lines[-1].endswith("\n")

    def add(self, kind: str, **values: Any) -> None:
        """Write one record."""
        record = {"kind": kind, **values}
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(("" if self._whole else "\n") + json.dumps(record) + "\n")
        self._whole = True

    def begin(self, key: str, seconds: float = STEP_SECONDS) -> None:
        """Say what is about to be tried, and how long it may take."""
        self.add("begin", key=key, seconds=seconds)

    def fail(self, key: str, text: str) -> None:
        """Say that a step did not work, and why."""
        self.add("failed", key=key, text=text)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return all records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def done(self) -> set[str]:
        """Return the keys of the jobs that have a result."""
        kinds = ("cell", "sweep", "job")
        return {record["key"] for record in self.records if record["kind"] in kinds}

    def failures(self) -> dict[str, str]:
        """Return what did not work, and why."""
        return {record["key"]: record["text"] for record in self.of("failed")}

    def last_begun(self) -> dict[str, Any] | None:
        """Return the step that was begun last."""
        begun = self.of("begin")
        return begun[-1] if begun else None


def one_line(error: BaseException) -> str:
    """Return an error in one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def supervise(
    command: Sequence[str], path: Path, *, deadline: float, most_restarts: int = MOST_RESTARTS
) -> int:
    """Run `command`, which writes the journal at `path`, until it has nothing more to do.

    Args:
        command: the measuring process; it goes on where the journal ends.
        path: the journal.
        deadline: of time.time(); measuring stops by itself before, here only a stuck one ends.
        most_restarts: after so many deaths it is given up.

    Returns:
        0: it came to its end. Otherwise the exit code of the process that was the last.
    """
    code = 1
    for _ in range(most_restarts + 1):
        before = Journal(path)
        # Ctrl-C ends it through this process, which says so.
        process = subprocess.Popen(command, process_group=0)
        try:
            code = _watch(process, path, deadline)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        journal = Journal(path)
        begun = journal.last_begun()
        if code in (0, USAGE) or begun is None:
            return code
        if len(journal.of("begin")) == len(before.of("begin")) or begun["key"] in before.failures():
            return code  # it would die the same way again
        if begun["key"] not in journal.failures():
            journal.fail(begun["key"], _death(code, begun["seconds"]))
        if time.time() > deadline:
            return code
    return code


def _watch(process: subprocess.Popen[bytes], path: Path, deadline: float) -> int:
    """Wait for the process, or end it when a step takes longer than it may."""
    begun_at, size, allowed = time.time(), 0, STEP_SECONDS
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        size_now = path.stat().st_size if path.exists() else 0
        if size_now != size:
            begun_at, size = time.time(), size_now
            allowed = _allowed_seconds(path)
        if time.time() - begun_at > allowed or time.time() - deadline > STEP_SECONDS:
            process.kill()
            process.wait()
            return KILLED
    return process.returncode


def _allowed_seconds(path: Path) -> float:
    """Return how long the step may take that was begun last, from the end of the journal."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if line.startswith(b'{"kind": "begin"') and line.endswith(b"}"):
            return float(json.loads(line)["seconds"])
    return STEP_SECONDS


def _death(code: int, seconds: float) -> str:
    if code == KILLED:
        return f"no end within {seconds:g} s: killed"
    if code < 0:
        return f"the process died of signal {-code}"
    return f"the process ended with exit code {code}"
