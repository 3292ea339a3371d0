"""Servers in processes of their own, on cores of their own, and what the kernel says of them.

Linux only: processor time and memory come from /proc.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
CPUCLOCK_SCHED = 2
STOP_SECONDS = 20
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ServerProcess:
    """One server that answers on `target`."""

    pid: int
    target: str
    metrics: str = ""
    """Address of its metrics port, if it has told one."""

    def cpu_seconds(self) -> float:
        """User and system time of all threads since its start, to the nanosecond."""
        # As clock_getcpuclockid(3) does it on Linux. /proc/PID/stat counts in ticks of 10 ms, which
        # are some percent of a short run.
        return time.clock_gettime(~self.pid << 3 | CPUCLOCK_SCHED)

    def anonymous_bytes(self) -> int:
        """Resident memory that no file backs: heap, stacks, buffers."""
        return status_bytes(self.pid, "RssAnon")


def status_bytes(pid: int | str, key: str) -> int:
    """Return one of the sizes in /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/{pid}/status has no {key}")


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, on the given cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def started(words: Sequence[str], cores: set[int]) -> Iterator[ServerProcess]:
    """Run a server that prints "ready on HOST:PORT" on the given cores, and stop it."""
    with ExitStack() as stack:
        # A file, because a pipe that nobody reads could fill up.
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        with on_cores(cores):  # the child counts its usable cores from it
            process = subprocess.Popen(
                [sys.executable, *words], stdout=subprocess.PIPE, stderr=log, text=True
            )
        stack.callback(_stop, process)
        assert process.stdout is not None
        metrics = ""
        for line in process.stdout:
            if line.startswith("metrics on "):
                metrics = line.split()[-1]
            if line.startswith("ready on "):
                yield ServerProcess(process.pid, line.split()[-1], metrics)
                return
        log.seek(0)
        raise SystemExit(f"{' '.join(words)} did not start:\n{log.read()}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def qlinear_words(model: Path) -> list[str]:
    """Return how the real server is started: free ports, quick end, all else by default."""
    quiet = ["--drain-delay-seconds", "0", "--log-level", "warning"]
    ports = ["--port", "0", "--metrics-port", "0"]
    return ["-m", "qlinear_service", "serve", str(model), *ports, *quiet]


def echo_words() -> list[str]:
    """Return how the echo server is started."""
    return [str(FOLDER / "echo_server.py")]


def core_split() -> tuple[set[int], set[int]]:
    """Return cores for the server (one) and for this process (the others); all if there is one."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        return set(usable), set(usable)
    return {usable[0]}, set(usable[1:])


class Others:
    """How busy the machine was with other things while something was measured."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy = _busy_seconds()

    def cores(self, own_cpu_seconds: float) -> float:
        """Return the cores that other processes kept busy on average since construction."""
        seconds = time.monotonic() - self._began
        return max((_busy_seconds() - self._busy - own_cpu_seconds) / seconds, 0.0)


def _busy_seconds() -> float:
    user, nice, system, _idle, _wait, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + soft + steal) / TICKS_PER_SECOND
