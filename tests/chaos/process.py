"""The server of a chaos run as a process: started, ended, started again, looked at from outside.

Linux only: memory and file descriptors come from /proc.
"""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from chaos.ledger import Away
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 300  # on a machine that does ten other things
STOP_SECONDS = 120
AWAY_SECONDS = 8.0
"""So long after a restart channels may still wait before they connect again."""

HERE = Path(__file__).parent
FLAGS = (
    *("--max-request-rows", "2048", "--max-queue-rows", "4096", "--max-queue-bytes", "16777216"),
    *("--max-request-bytes", "4194304", "--max-response-bytes", "4194304"),
    *("--max-queue-age", "0.5", "--max-batch-rows", "256", "--max-stream-calls", "64"),
    *("--drain-delay-seconds", "0.3", "--grace-seconds", "20", "--measure-seconds", "1"),
    *("--log-level", "warning"),
)


class Server:
    """One address, and the processes that serve it one after the other.

    Args:
        models: folder that is served.
        folder: for logs and measured costs.
        seed: of the injected faults.
        flags: further ones.
        library: of a GPU that is none, to serve on; None: the CPU.
    """

    def __init__(
        self,
        models: Path,
        folder: Path,
        seed: int,
        flags: tuple[str, ...] = (),
        library: Path | None = None,
    ) -> None:
        self._models = models
        self._folder = folder
        self._seed = seed
        on_gpu = ("--device", "cuda:0", "--dispatcher", "native")
        self._flags = (*flags, *(("--device", "cpu") if library is None else on_gpu))
        self._library = library
        self._process: subprocess.Popen[str] | None = None
        self.is_away = False
        """Whether it is being ended or started."""
        self._back_at = self._killed_until = -math.inf
        self.generation = 0
        self.target = ""
        self._metrics = ""

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        assert self._process is not None
        return self._process.pid

    def how_away(self, since: float) -> Away:
        """Say how the server was away at any time after `since`, on the loop's clock."""
        if since < self._killed_until + AWAY_SECONDS:
            return Away.KILLED
        if self.is_away or since < self._back_at + AWAY_SECONDS:
            return Away.IN_ORDER
        return Away.NEVER

    async def start(self) -> None:
        """Start a process and wait until it serves."""
        self.generation += 1
        port = self.target.rpartition(":")[2] or "0"
        words = [str(HERE / "server.py"), str(self._seed + self.generation), str(self._models)]
        words += [*FLAGS, "--port", port, "--metrics-port", "0", *self._flags]
        words += ["--cache-dir", str(self._folder / "cache")]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QLINEAR_")}
        with self.log.open("w") as log:
            if self._library is not None:
                environment["CHAOS_LIBRARY"] = str(self._library)
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        await asyncio.wait_for(asyncio.to_thread(self._read_addresses), START_SECONDS)
        self.is_away, self._back_at = False, asyncio.get_running_loop().time()
        self._killed_until = min(self._killed_until, self._back_at)

    def _read_addresses(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("metrics on "):
                self._metrics = f"http://{line.split()[-1]}/metrics"
            if line.startswith("ready on "):
                self.target = line.split()[-1]
                return
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")

    @property
    def log(self) -> Path:
        """What the process of now has written."""
        return self._folder / f"server-{self._seed}-{self.generation}.log"

    async def end(self, number: signal.Signals) -> str:
        """Send a signal and wait for the end; return what is wrong with it, "" if nothing is."""
        process = self._process
        assert process is not None
        self.is_away = True
        if number is signal.SIGKILL:
            self._killed_until = math.inf  # until it is back
        process.send_signal(number)
        try:
            code = await asyncio.to_thread(process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"the server did not end in {STOP_SECONDS} s after {number.name}"
        assert process.stdout is not None
        process.stdout.close()
        expected = 0 if number is signal.SIGTERM else -number
        problem = "" if code == expected else f"exit code {code} after {number.name}"
        return problem or self.noise()

    def noise(self) -> str:
        """Return the first line of the log that tells of a fault which was not injected."""
        for line in self.log.read_text(errors="replace").splitlines():
            is_bad = " level=ERROR " in line or " level=CRITICAL " in line
            if is_bad and " event=request_failed " not in line:
                return f"the server's log has: {line}"
        return ""

    def knows(self, incidents: set[str]) -> bool:
        """Say whether each of these stands in the log of any of its processes."""
        logs = "".join(
            (self._folder / f"server-{self._seed}-{number}.log").read_text(errors="replace")
            for number in range(1, self.generation + 1)
        )
        return all(f"incident={incident}" in logs for incident in incidents)

    def kill(self) -> None:
        """End it in any case."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def descriptors(self) -> int:
        """Return how many file descriptors are open."""
        return descriptors_of(self.pid)

    def anonymous_bytes(self) -> int:
        """Return the resident memory that no file backs."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        raise LookupError("no RssAnon")

    def metrics(self) -> dict[str, float]:
        """Return the sum of each metric over its labels; of calls, those that ended well, too."""
        with urllib.request.urlopen(self._metrics, timeout=20) as response:
            text = response.read().decode()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.labels.get("code") == "OK" and "MatMul" in sample.labels["method"]:
                    sums["answered"] = sums.get("answered", 0.0) + sample.value
        return sums


def descriptors_of(pid: int | str) -> int:
    """Return how many file descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


async def settles(value: object, reach: object, seconds: float = 30.0) -> bool:
    """Wait until `value()` is at most `reach`; return whether that came."""
    end = time.monotonic() + seconds
    while value() > reach:  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.1)
    return True
