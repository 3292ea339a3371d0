"""The command line of `python -m qlinear_service.kernels.build`. Builds nothing."""

import argparse
from pathlib import Path

from qlinear_service.kernels.architectures import ARCHITECTURES
from qlinear_service.kernels.build_cuda import LINE_INFO, RACECHECK
from qlinear_service.kernels.cuda_library import PREBUILT

__all__ = ["parser"]


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    found = argparse.ArgumentParser(
        prog="python -m qlinear_service.kernels.build",
        description="Builds the CPU library and, where there are GPUs, theirs, into the cache.",
    )
    kind = found.add_mutually_exclusive_group()
    kind.add_argument("--cuda", action="store_true", help="build the GPU library and no other")
    kind.add_argument("--cpu", action="store_true", help="build the CPU library into the package")
    found.add_argument(
        "--arch",
        default=",".join(ARCHITECTURES),
        metavar="LIST",
        help="architectures of the GPU library, e.g. 80,90a; native: the GPUs of this machine "
        "[%(default)s]",
    )
    flags = found.add_mutually_exclusive_group()
    flags.add_argument(
        "--line-info",
        dest="more_flags",
        action="store_const",
        const=LINE_INFO,
        default=(),
        help="a GPU library in which profilers and compute-sanitizer find lines",
    )
    flags.add_argument(
        "--racecheck",
        dest="more_flags",
        action="store_const",
        const=RACECHECK,
        help="the same, in which racecheck can follow every order; not for servers",
    )
    place = found.add_mutually_exclusive_group()
    place.add_argument("--output", type=Path, metavar="FILE", help="copy the GPU library there")
    place.add_argument(
        "--prebuilt",
        dest="output",
        action="store_const",
        const=PREBUILT,
        help="copy the GPU library into the package, where it is found without a compiler",
    )
    return found
