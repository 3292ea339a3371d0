"""Several servers as processes: one port, an address of the loopback network for each.

As pods behind a headless Service: all listen on the same port, and a name server lists them.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from urllib.request import urlopen

from name_server import Names
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 120
BACK_SECONDS = 60.0
CALLS = 20
FLAGS = (
    *("--device", "cpu", "--cpu-threads", "1", "--measure-seconds", "1", "--log-level", "warning"),
    *("--metrics-port", "0", "--drain-delay-seconds", "1"),
)
ENVIRONMENT = {name: v for name, v in os.environ.items() if not name.startswith("QLINEAR_")}


class Replica:
    """One address, and the processes that serve it one after the other."""

    def __init__(self, host: str, port: int, words: list[str]) -> None:
        self.host, self.port = host, port
        self._words = [sys.executable, "-m", "qlinear_service", "serve", *words, *FLAGS]
        self._words += ["--host", host, "--port", str(port)]
        self._process: subprocess.Popen[str] | None = None
        self._metrics = ""

    def start(self) -> None:
        """Start a process and wait until it serves."""
        self._process = subprocess.Popen(
            self._words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert self._process.stdout is not None
        said = [self._process.stdout.readline().split() for _ in range(3)]
        assert [line[:1] for line in said] == [["listening"], ["metrics"], ["ready"]], said
        self._metrics = said[1][-1]

    def end(self, number: Signals) -> None:
        """Send a signal and wait for the end."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(START_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert code == (0 if number is SIGTERM else -number)
        self._process = None

    def answered(self) -> float:
        """Return how many calls this process has answered well."""
        with urlopen(f"http://{self._metrics}/metrics", timeout=START_SECONDS) as got:
            families = list(text_string_to_metric_families(got.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        return sum(
            sample.value
            for sample in samples
            if sample.name == "qlinear_requests_total"
            and sample.labels["code"] == "OK"
            and sample.labels["method"].startswith("MatMul")
        )

    def close(self) -> None:
        """End it in any case."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.communicate()


def free_port(*hosts: str) -> int:
    """Return a port that is free on all of these addresses."""
    while True:
        with ExitStack() as stack, contextlib.suppress(OSError):
            port = stack.enter_context(socket.create_server((hosts[0], 0))).getsockname()[1]
            for host in hosts[1:]:
                stack.enter_context(socket.create_server((host, port)))
            return int(port)


@contextmanager
def replicas(count: int, cache: Path, models: Path, *flags: str) -> Iterator[list[Replica]]:
    """Yield servers of `models` on 127.0.0.2 and the addresses after it; none is started."""
    hosts = [f"127.0.0.{number}" for number in range(2, 2 + count)]
    words = [str(models), "--cache-dir", str(cache), *flags]
    with ExitStack() as stack:
        port = free_port(*hosts)
        own = [Replica(host, port, words) for host in hosts]
        for replica in own:
            stack.callback(replica.close)
        yield own


def until_all_answer(own: list[Replica], seconds: float) -> None:
    """Wait until each of these has answered so many more calls."""
    began = time.monotonic()
    before = [replica.answered() for replica in own]
    while True:
        more = [replica.answered() - had for replica, had in zip(own, before, strict=True)]
        if min(more) >= CALLS:
            return
        assert time.monotonic() < began + seconds, f"not all answer: {more} more calls each"
        time.sleep(0.2)


def start_two(names: Names, three: list[Replica]) -> None:
    """Start two of three servers and let their name stand for them."""
    for replica in three[:2]:
        replica.start()
    names.show(*(replica.host for replica in three[:2]))


def come_restart_and_die(names: Names, three: list[Replica], found_seconds: float) -> None:
    """Let a third server come beside two that are called; restart the first, kill the second.

    Args:
        names: told of what comes, and of the killed one only after a while.
        three: callers call them all the time.
        found_seconds: within which a new one must answer calls.
    """
    first, second, third = three
    until_all_answer([first, second], BACK_SECONDS)

    third.start()
    names.show(*(replica.host for replica in three))
    until_all_answer([third], found_seconds)
    until_all_answer(three, BACK_SECONDS)

    first.end(SIGTERM)  # the name still lists it
    first.start()
    until_all_answer(three, BACK_SECONDS)

    second.end(SIGKILL)
    until_all_answer([first, third], BACK_SECONDS)
    names.show(first.host, third.host)
    until_all_answer([first, third], BACK_SECONDS)
