"""`qlinear serve` as a process for the length of a block."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {name: v for name, v in os.environ.items() if not name.startswith("QLINEAR_")}
PROGRAM = (sys.executable, "-m", "qlinear_service")
FLAGS = ("--port", "0", "--metrics-port", "-1", "--device", "cpu", "--drain-delay-seconds", "0")


@contextmanager
def serve_process(
    model: Path,
    *flags: str,
    program: Sequence[str] = PROGRAM,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[str]:
    """Yield the address of a server that is ready."""
    words = [*program, "serve", str(model), *FLAGS, *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            assert lines[1].startswith("ready on "), lines
            yield lines[1].split()[-1]
        finally:
            process.terminate()
            process.wait(60)
