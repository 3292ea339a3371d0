"""Our CUDA kernels against the floor of this GPU, against cuBLAS and against Humming.

This process finds the library, watches the one that measures (kernel_run.py) and reports.
`qlinear bench kernel --help` tells the method.
"""

import contextlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from figures import console, write_json
from kernel_figures import FILL_BYTES
from kernel_journal import USAGE, Journal, supervise
from kernel_options import Options, parse
from kernel_plot import plot
from kernel_report import as_json, build_report, is_bad
from kernel_roofline import draw_roofline
from kernel_tables import print_report
from needs_gpu import gpu_missing

from qlinear_service.errors import BuildError
from qlinear_service.kernels.architectures import chosen_architectures
from qlinear_service.kernels.build import default_cache_dir
from qlinear_service.kernels.cuda_library import cuda_library

PROG = "qlinear bench kernel"
ROOT = Path(__file__).parents[1]
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


@contextlib.contextmanager
def library_of(named: Path | None) -> Iterator[Path]:
    """Yield our library: the one that was named, or one for the GPUs of this machine.

    Raises:
        BuildError: there is none and it cannot be built, or there is no such file.
    """
    if named is not None:
        if not named.is_file():
            raise BuildError(f"--library {named}: there is no such file")
        yield named.resolve()
        return
    with cuda_library(default_cache_dir(), chosen_architectures(["native"])) as path:
        yield path


def commit_of(told: str | None) -> str:
    """Return the commit that is measured, as told or as git says."""
    if told is not None:
        return told
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def watched(
    program: str, words: list[str], library: Path, budget_seconds: float
) -> tuple[int, Journal]:
    """Run the measuring process of `program`; return its exit code and its journal."""
    with tempfile.TemporaryDirectory(prefix="qlinear-bench-") as folder:
        path = Path(folder) / "journal"
        deadline = time.time() + budget_seconds
        command = [sys.executable, program, *words, "--journal", str(path)]
        command += ["--library", str(library), "--deadline", str(deadline)]
        try:
            code = supervise(command, path, deadline=deadline)
        except KeyboardInterrupt:
            code = INTERRUPTED
        return code, Journal(path)


def show(options: Options, report: dict[str, Any]) -> None:
    """Print and write a report, and draw what is asked for."""
    print_report(console(json_to_stdout=options.json == "-"), report)
    write_json(options.json, as_json(report))
    for draw, path in ((plot, options.plot), (draw_roofline, options.roofline)):
        if path is not None and report["cells"]:
            try:
                draw(report, path)
            except ImportError as error:
                print(f"{PROG}: {path} needs matplotlib: {error}", file=sys.stderr)


def show_again(options: Options, path: Path) -> int:
    """Show the figures of an earlier run and return the exit code; needs no GPU."""
    try:
        report = json.loads(path.read_text())
        show(options, report)
    except (OSError, ValueError, KeyError) as error:
        print(f"{PROG}: {path} is no JSON of this benchmark: {error!r}", file=sys.stderr)
        return USAGE
    return int(is_bad(report))


def run(options: Options, words: list[str]) -> int:
    """Measure in another process, report here, and return the exit code."""
    started = time.monotonic()
    facts: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(options.commit),
        "command": " ".join(["kernel.py", *words]),
        "python": platform.python_version(),
        "replays": options.replays,
        "fill_mib": FILL_BYTES >> 20,
    }
    with library_of(options.library_file) as library:  # building does not count
        code, journal = watched(__file__, words, library, options.budget_seconds)
    if code == USAGE:
        return code
    facts["seconds"] = round(time.monotonic() - started, 1)
    report = build_report(journal)
    report["facts"] = facts | report["facts"]
    show(options, report)
    if code:
        print(f"{PROG}: the measuring process ended early (exit code {code})", file=sys.stderr)
    return INTERRUPTED if code == INTERRUPTED else int(bool(code) or is_bad(report))


def main(words: list[str]) -> int:
    """Run with these flags."""
    options = parse(words)
    if options.journal is not None:
        from kernel_run import measure

        assert options.library_file is not None
        return measure(options, options.library_file)
    if options.from_json is not None:
        return show_again(options, options.from_json)
    if gpu_missing(PROG):
        return USAGE
    try:
        return run(options, words)
    except BuildError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
