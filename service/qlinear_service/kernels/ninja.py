"""Runs ninja for the kernel libraries: finds the tools, runs to the end or until stopped.

Knows neither which sources there are nor where libraries are kept. Standard library only.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from qlinear_service.errors import BuildError

__all__ = [
    "SOURCE_ROOT",
    "CompileFailed",
    "ToolMissing",
    "escape",
    "find_compiler",
    "find_ninja",
    "quoted",
    "run_ninja",
    "usable_cores",
    "version_of",
]

SOURCE_ROOT = Path(__file__).resolve().parents[1] / "csrc"
"""The C++ sources: a link to the checkout's csrc/, a copy of it in an installed package."""

STOP_CHECK_SECONDS = 0.2


class ToolMissing(BuildError):
    """There is no compiler or no ninja here; the text says which and how to get it."""


class CompileFailed(BuildError):
    """The sources do not compile.

    Args:
        problem: one sentence with the compiler's first error.
        output: all that ninja and the compilers said.
    """

    def __init__(self, problem: str, output: str) -> None:
        self.output = output
        super().__init__(problem)


def find_ninja() -> str:
    """Return the path of ninja, of this Python's environment first.

    Raises:
        ToolMissing: there is none.
    """
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{_path()}")
    if ninja is None:
        raise ToolMissing("no ninja: install it with: pip install ninja")
    return ninja


def find_compiler() -> str:
    """Return the path of the C++ compiler: CXX, g++ or c++.

    Raises:
        ToolMissing: there is none.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise ToolMissing("no C++ compiler: install g++ (Debian: apt-get install g++), or set CXX")
    return compiler


def version_of(tool: str) -> str:
    """Return all that a compiler says of its version."""
    return subprocess.run(
        [tool, "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()


def escape(path: str | Path) -> str:
    """Return `path` as the name of a file in a build line, where blanks and colons are signs."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def quoted(word: str | Path) -> str:
    """Return `word` as a word of a command: ninja hands commands to a shell."""
    return shlex.quote(str(word)).replace("$", "$$")


def usable_cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_ninja(
    lines: Sequence[str],
    work_dir: Path,
    *,
    what: str,
    ninja: str,
    options: Sequence[str] = (),
    stop: threading.Event | None = None,
    log: Path | None = None,
) -> str:
    """Run what `lines` describe in `work_dir` and return all that was said.

    Args:
        lines: the build file.
        work_dir: an empty folder, where everything is written.
        what: what is compiled, for errors, e.g. "the CPU kernels".
        ninja: its path.
        options: more words for ninja.
        stop: set when nobody wants the result any more.
        log: where to keep the output of a failure; None keeps none.

    Raises:
        CompileFailed: a command failed.
        BuildError: `stop` came first.
    """
    (work_dir / "build.ninja").write_text("\n".join(lines) + "\n")
    code, output = _finish([ninja, "-C", str(work_dir), *options], what=what, stop=stop)
    if code == 0:
        return output
    where = "a cache that can be written keeps the whole output"
    if log is not None:
        log.write_text(output)
        where = f"the whole output is in {log}"
    raise CompileFailed(f"compiling {what} failed: {_first_error(output)}; {where}", output)


def _first_error(output: str) -> str:
    """Return the line of the first error, or the last line where none is marked as one."""
    said = [line for line in output.splitlines() if line.strip()]
    marks = (" error: ", " error #", "ptxas error", " fatal ", "catastrophic error")
    first = next((line for line in said if any(mark in line for mark in marks)), None)
    return (first or "".join(said[-1:])).strip()


def _finish(command: Sequence[str], *, what: str, stop: threading.Event | None) -> tuple[int, str]:
    """Run a command to its end and return its exit code and words; kill it if `stop` is set."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"LC_ALL": "C"},  # errors are looked for by the English word
        start_new_session=True,  # Ctrl-C in the terminal is for us, who then end the command
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=STOP_CHECK_SECONDS)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                if stop is not None and stop.is_set():
                    raise BuildError(f"compiling {what} was stopped") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)  # ninja ends its compilers in turn
            process.communicate()


def _path() -> str:
    return os.environ.get("PATH", os.defpath)
