"""`qlinear bench`: runs a benchmark of the source checkout in a process of its own.

The benchmarks are scripts in benchmarks/, beside the code that they measure, and are not
installed; their flags are their own (`qlinear bench service --help`).
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from qlinear_service.errors import QlinearError

__all__ = ["add_arguments", "run"]

BENCHMARKS = {
    "service": ("service.py", "processor time of a call, against a bare echo server"),
    "gpus": ("gpus_together.py", "several GPUs that share out layers or hold all, against one"),
    "invariance": ("invariance.py", "what the batch-invariant mode costs, on the CPU or a GPU"),
    "cpu": ("cpu_op.py", "the CPU operation, against torch's own"),
    "metrics": ("metrics.py", "what metrics, traces and scrapes cost"),
    "kernel": ("kernel.py", "the CUDA kernels, against their floor, cuBLAS and Humming"),
    "ablation": ("ablation.py", "the Hopper kernels, with one technique taken out at a time"),
    "chain": ("chain.py", "the layers of a block as one chain of launches, against reading them"),
    "mix": ("kernel_mix.py", "decode and prefill in turn, against each alone and cuBLAS"),
    "overload": ("overload.py", "three times what the engine can do: goodput, refusals"),
    "schedule": ("schedule.py", "the scheduler, against FIFO and a fixed window, simulated"),
    "slab": ("slab_fed.py", "the batcher fed from the slab, without gRPC, at 0.2 to 2 x capacity"),
    "dispatch": (
        "dispatcher.py",
        "the native dispatcher's own time, and a modelled load, without a GPU",
    ),
    "checkpoint": ("checkpoint.py", "packing a checkpoint and loading it, against copy and cat"),
    "tune": ("kernel_tune.py", "the fastest plan of each shape on this GPU, kept in a table"),
    "soak": ("soak.py", "the server's memory over many calls"),
}
FOLDER = Path(__file__).parents[3] / "benchmarks"
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to run, and the flags that are handed on to it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        f"  {name:<10}  {text}" for name, (_, text) in sorted(BENCHMARKS.items())
    )
    parser.add_argument("what", choices=sorted(BENCHMARKS), metavar="WHAT", help="see below")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="flags of that benchmark; --help lists them",
    )


def run(args: argparse.Namespace) -> int:
    """Run it and return its exit code.

    Raises:
        QlinearError: this is not a source checkout.
    """
    script = FOLDER / BENCHMARKS[args.what][0]
    if not script.is_file():
        raise QlinearError(
            f"{script} does not exist: benchmarks come with the source checkout, "
            "not with the installed package"
        )
    try:
        process = _started(args.what, args.words)
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal sent it to both
            process.wait()
            raise
    except KeyboardInterrupt:
        return INTERRUPTED


def _started(what: str, words: list[str]) -> "subprocess.Popen[bytes]":
    """Start a benchmark, which says itself that Ctrl-C has ended it.

    Its own process, because what was imported and allocated here would be measured with it.
    """
    # Ctrl-C waits in the new process until that can say so, and here until it is there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen([sys.executable, str(FOLDER), what, *words])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
