"""Runs one benchmark in this process: `python benchmarks WHAT ...`, as `qlinear bench` does.

What cannot be measured here, and Ctrl-C whenever it comes, end with one line: importing torch alone
takes seconds.
"""

import runpy
import signal
import sys
from pathlib import Path

from qlinear_service.commands.bench import BENCHMARKS, INTERRUPTED
from qlinear_service.errors import QlinearError


def main(what: str, words: list[str]) -> int:
    """Run a benchmark with these flags and return the exit code."""
    sys.argv = [str(Path(__file__).with_name(BENCHMARKS[what][0])), *words]
    try:
        # `qlinear bench` has it wait until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        runpy.run_path(sys.argv[0], run_name="__main__")
    except QlinearError as error:  # no such GPU, mostly
        print(f"qlinear bench {what}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"qlinear bench {what}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
