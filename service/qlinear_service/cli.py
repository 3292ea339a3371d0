"""The `qlinear` program: finds the verb, hands over, turns errors into one line and an exit code.

A verb lives in `commands/<verb>.py` as `add_arguments(parser)` and `run(args) -> exit code`; only
the verb that was asked for is imported, so `qlinear call` works in an install without torch.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from qlinear_service import __version__
from qlinear_service.errors import QlinearError

__all__ = ["main"]

VERBS = {
    "serve": "serve a packed file, a checkpoint folder, or a folder of several models",
    "pack": "turn a checkpoint into one packed file",
    "inspect": "show what a checkpoint or packed file holds",
    "call": "send one activation array to a running server",
    "load": "drive a running server and show latencies, rates and wrong answers",
    "top": "show what a running server does, in a terminal; --json for machines",
    "doctor": "say what this machine has for serving; --health asks a running server",
    "plan": "show how a product is cut on a GPU, and what it takes; needs no GPU",
    "bench": "measure this machine with the benchmarks of a source checkout",
}
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    return "\n".join(
        ["usage: qlinear VERB ...", "", *lines, "", "qlinear VERB --help tells more of one verb."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `qlinear` with `argv` (default: the process's own) and return its exit code.

    0: done. 1: it failed, with one sentence on stderr; or, silently, whoever read its output
    stopped reading, as `head` does. 2: it was called wrongly. 130: Ctrl-C.
    """
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # a closed pipe must be met here, not when the interpreter ends
    except BrokenPipeError:
        # What could not be written is still buffered; the interpreter's last flush must succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"qlinear {__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        print(f"qlinear: there is no verb {verb!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return _run(verb, words[1:])
    except QlinearError as error:
        print(f"qlinear {verb}: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:  # of the verb itself, or of what it imports later
        if error.name is None or error.name.startswith("qlinear_service"):
            raise
        print(
            f"qlinear {verb}: the package {error.name!r} is missing; "
            "install it with: pip install 'qlinear[server]'",
            file=sys.stderr,
        )
    return 1


def _run(verb: str, words: list[str]) -> int:
    command = importlib.import_module(f"qlinear_service.commands.{verb}")
    parser = argparse.ArgumentParser(prog=f"qlinear {verb}", description=VERBS[verb])
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(words)))
