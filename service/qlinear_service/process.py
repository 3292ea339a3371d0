"""What a serving process sets before grpc and torch are imported: malloc, event engine, OpenMP.

Each was measured to decide more about the cost of a call than our own code does; the figures are
in docs/performance.md. Standard library only.
"""

import ctypes
import gc
import logging
import sys
from collections.abc import MutableMapping
from importlib.metadata import version

from qlinear_service.log_values import event

__all__ = ["collect_rarely", "tune_conversion", "tune_process"]

logger = logging.getLogger(__name__)

# From malloc.h of glibc.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

KEPT_BYTES = 256 << 20
"""Free memory that stays with the process: some of the largest messages, not all of a burst."""

LARGE_BLOCK_BYTES = 4 << 20
"""Above it a block goes back to the kernel when it is freed: a layer, but not the slabs of one."""

LISTENER_EXPERIMENT_SINCE = (1, 80)
"""From this grpcio release on its new listener costs up to 1.6 x CPU per call (grpc/grpc#43092)."""


GC_THRESHOLD = 50_000
"""Objects between two collections of the young; Python's 700 is one collection every 30 calls."""


def tune_process(environ: MutableMapping[str, str]) -> None:
    """Set malloc, gRPC's event engine and OpenMP's waiting; call it before `import grpc`.

    Whatever the user has set himself in `environ` stays as it is.

    Args:
        environ: the process's environment, which gRPC reads at its import.

    Raises:
        RuntimeError: grpc is imported already, so the choice would be ignored.
    """
    if "grpc" in sys.modules:
        raise RuntimeError("tune_process must run before grpc is imported")
    _pin_malloc(environ)
    release = tuple(int(part) for part in version("grpcio").split(".")[:2])
    if release >= LISTENER_EXPERIMENT_SINCE:
        environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    # Threads that wait for the next multiplication would otherwise spin, which on a machine that
    # does anything else takes the very core that the working thread needs: 40 times as long.
    environ.setdefault("OMP_WAIT_POLICY", "passive")


def collect_rarely() -> None:
    """Keep the garbage collector from what exists now, and from running every few calls.

    Call it once everything is loaded: torch and the layers are a million objects that stay, and
    calls leave next to no cycles behind.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def tune_conversion(environ: MutableMapping[str, str]) -> None:
    """Set malloc and OpenMP's waiting for `qlinear pack`; call it before `import torch`.

    By default glibc learns from the first large block that is freed to keep the next ones, and a
    program that never needs more than a layer keeps several.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")  # see tune_process
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK_BYTES)


def _pin_malloc(environ: MutableMapping[str, str]) -> None:
    """Keep freed megabytes for the next message instead of returning them to the kernel.

    By default glibc maps every large block and unmaps it again, which costs a page fault for each
    4 KiB: 33 times the whole cost of a 2 MiB message. Both thresholds are needed. One arena for all
    threads: a message that one thread allocates and another frees would leave each of several
    arenas with room of its own, and memory would grow for a long time.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl has none
        return
    pinned = (
        mallopt(M_MMAP_THRESHOLD, 1 << 30),
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES),
        mallopt(M_ARENA_MAX, 1),
    )
    if not all(pinned):
        event(logger, logging.WARNING, "malloc_not_pinned", effect="large messages cost more")
