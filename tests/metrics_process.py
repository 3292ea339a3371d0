"""A server process with a metrics port, and what one reads there."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
WAIT_SECONDS = 20.0


def get(address: str, path: str, accept: str = "") -> tuple[str, str]:
    """Return the body and the content type."""
    with urlopen(Request(f"http://{address}{path}", headers={"Accept": accept}), timeout=20) as got:
        return got.read().decode(), got.headers["Content-Type"]


@dataclass
class Process:
    """A server process and its two addresses."""

    process: asyncio.subprocess.Process
    target: str
    metrics: str


def words(model: Path, *more: str) -> list[str]:
    ports = ["--port", "0", "--metrics-port", "0", "--drain-delay-seconds", "0"]
    return ["-m", "qlinear_service", "serve", str(model), *ports, "--log-level", "error", *more]


@asynccontextmanager
async def served(model: Path, *more: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words(model, *more), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        lines = [(await process.stdout.readline()).decode().split() for _ in range(3)]
        assert [line[0] for line in lines] == ["listening", "metrics", "ready"]
        yield Process(process, lines[0][-1], lines[1][-1])
    finally:
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 0
