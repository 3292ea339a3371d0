"""The native dispatcher fed by a native producer: what a GPU server does without Python and gRPC.

The dispatcher is the server's own, as the server makes it; only who hands in descriptors and takes
completions is not: feeder.cpp, compiled here, in a thread of its own.
"""

import ctypes
import dataclasses
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from slab_variant import STANDARD, Variant

from qlinear_service.config import (
    NATIVE,
    SMALLEST_SLOT_BYTES,
    BatchingConfig,
    KernelConfig,
    ServiceConfig,
)
from qlinear_service.dispatch.abi import limits_of
from qlinear_service.dtypes import DType
from qlinear_service.engine import WorkerThread
from qlinear_service.gpu import direct
from qlinear_service.gpu.direct import DirectEngine
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.room import rows_of_batches
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels.ninja import SOURCE_ROOT, find_compiler
from qlinear_service.loaded import Loaded
from qlinear_service.runners import new_runner, paces_of
from qlinear_service.slots import Slab

SLAB_BYTES = 1 << 30
MOST_SLOTS = 8192
"""Calls that wait or run; beyond it the producer refuses them, as the slab is its to give."""
LONE_SECONDS = 0.5
LONE_GAPS = {"at once": 0.0, "after 1 ms": 1e-3}


class FeedOptions(ctypes.Structure):
    """Mirror of feed_options in feeder.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dispatch", "submit", "drain", "host_done", "slab")),
        *(("slot_unit_bytes", ctypes.c_int64), ("slots", ctypes.c_void_p)),
        *(("slots_count", ctypes.c_int64), ("row", ctypes.c_char_p)),
        *(("row_bytes", ctypes.c_int64), ("first_number", ctypes.c_uint64)),
        *((name, ctypes.c_int32) for name in ("layer", "dtype")),
        *((name, ctypes.c_double) for name in ("rate", "seconds", "gap_seconds")),
    ]


class FeedResult(ctypes.Structure):
    """Mirror of feed_result."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("offered", "answered", "in_time", "refused")),
        *((name, ctypes.c_int64) for name in ("hosted", "batches", "rows")),
        *((name, ctypes.c_double) for name in ("passed", "worst_lateness", "median", "p99")),
        *((name, ctypes.c_double) for name in ("median_beyond", "mean_kernel")),
    ]


def build_feeder(folder: Path) -> ctypes.CDLL:
    """Compile the producer."""
    built = folder / "libfeeder.so"
    source = Path(__file__).with_name("feeder.cpp")
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    words = [find_compiler(), *flags, f"-I{SOURCE_ROOT}", str(source), "-o", str(built)]
    subprocess.run(words, check=True)
    return ctypes.CDLL(str(built))


class NativeFeed:
    """A dispatcher over a GPU, and one-row calls for its only layer.

    Args:
        loaded: one layer on a GPU, and its curve.
        folder: for what is compiled.
        variant: of the dispatcher.
        most_slots: calls that may wait or run.
    """

    def __init__(
        self,
        loaded: Loaded,
        folder: Path,
        *,
        variant: Variant = STANDARD,
        most_slots: int = MOST_SLOTS,
    ) -> None:
        assert isinstance(loaded.gpu, CudaStreams), "a GPU"
        if variant.urgent_rows:
            streams = CudaStreams(loaded.gpu.kernels, urgent_rows=True)
            loaded = dataclasses.replace(loaded, gpu=streams)
        assert isinstance(loaded.gpu, CudaStreams)
        kernels = loaded.gpu.kernels
        if variant.is_light and not kernels.library.ql_cuda_copies_parts(kernels.runtime.ordinal):
            raise ValueError(f"{variant} needs a library of CUDA 13: others copy one row at a time")
        self._feeder = build_feeder(folder)
        (self._layer,) = loaded.registry
        spec = self._layer.spec
        self._slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 22)
        self._worker = WorkerThread("engine")
        batching = BatchingConfig(dispatcher=NATIVE)
        config = ServiceConfig(kernels=KernelConfig(device="cuda:0"), batching=batching)
        stages = variant.stages
        engine = new_runner(loaded, config, self._slab, self._worker, stages=stages)
        assert isinstance(engine, GpuEngine)
        most_rows = rows_of_batches([self._layer], config.batching.max_batch_rows)
        self._direct = DirectEngine(
            engine=engine,
            streams=loaded.gpu,
            layers=[self._layer],
            slab=self._slab,
            limits=limits_of(
                [spec.name],
                paces_of(loaded, most_rows),
                max_batch_rows=most_rows,
                max_age_seconds=60,
            ),
            most_running=variant.stages,
            spare=variant.spare,
            row_blocks=variant.blocks,
            spinning=variant.spinning,
            timed_each=direct.TIMED_EACH if variant.is_light else 1,
            copied_row_bytes=direct.COPIED_ROW_BYTES if variant.is_light else 0,
            lanes=variant.lanes,
        )
        self._direct.teach(self._layer, DType.F16, DType.F16)
        self._gpu = loaded.gpu
        slot_bytes = 2 * max(spec.k, spec.n)
        self._slots = [self._slab.acquire(slot_bytes) for _ in range(most_slots)]
        self._x = torch.randn(spec.k).half()
        self._row = self._x.numpy().tobytes()
        self._number = 1

    def run(self, *, rate: float, seconds: float, gap_seconds: float = 0.0) -> FeedResult:
        """Feed for so long and return what became of it.

        Raises:
            RuntimeError: a result is wrong, or the dispatcher could not send a batch itself.
        """
        library, native = self._gpu.kernels.library, self._direct.native
        indices = (ctypes.c_uint32 * len(self._slots))(*(slot.index for slot in self._slots))
        options = FeedOptions(
            dispatch=native._handle,
            slab=self._slab.address,
            slot_unit_bytes=SMALLEST_SLOT_BYTES,
            slots=ctypes.addressof(indices),
            slots_count=len(self._slots),
            row=self._row,
            row_bytes=len(self._row),
            first_number=self._number,
            layer=0,
            dtype=DType.F16,
            rate=rate,
            seconds=seconds,
            gap_seconds=gap_seconds,
        )
        for name in ("submit", "drain", "host_done"):
            function = getattr(library, f"ql_dispatch_{name}")
            setattr(options, name, ctypes.cast(function, ctypes.c_void_p))
        for slot in self._slots:
            self._slab.view(slot)[: len(self._row)] = bytes(len(self._row))
        result = FeedResult()
        self._feeder.feed(ctypes.byref(options), ctypes.byref(result))
        self._number += result.offered + 1
        if result.hosted:
            raise RuntimeError(f"{result.hosted} calls came back: {native.error_text()}")
        self._check(min(len(self._slots), result.answered))
        return result

    def _check(self, answered: int) -> None:
        """Compare what lies in the slots that were used with a product that was in no batch."""
        n, kernels = self._layer.spec.n, self._gpu.kernels
        x = self._x[None].to(kernels.device)
        exact = kernels.linear(self._layer, x, DType.F32)[0].cpu()
        scale = float(exact.abs().max())
        used = 0
        for slot in self._slots:
            data = bytearray(self._slab.view(slot)[: 2 * n])
            y = torch.frombuffer(data, dtype=torch.float16).float()
            if not bool(y[:8].any()):
                continue  # this slot was not needed
            used += 1
            if float((y - exact).abs().max()) > 2e-2 * scale:
                raise RuntimeError(f"the result in {slot} is wrong")
        if not used or used > answered:
            raise RuntimeError(f"results lie in {used} slots after {answered} answers")

    def lone(self) -> dict[str, dict[str, float]]:
        """Return what one call at a time takes, medians in seconds, by what lies between calls."""
        self.run(rate=0, seconds=LONE_SECONDS)
        found = {}
        for name, gap in LONE_GAPS.items():
            result = self.run(rate=0, seconds=LONE_SECONDS, gap_seconds=gap)
            pair = 1e-9 * self._gpu.pair_nanoseconds
            added = result.median_beyond + pair
            found[name] = {"total_seconds": result.median, "added_seconds": added}
        return found

    def offer(self, rate: float, seconds: float) -> dict[str, float]:
        """Offer `rate` rows a second for so long, and wait for those that were let in."""
        found = self.run(rate=rate, seconds=seconds)
        return {
            "asked": rate,
            "offered": found.offered / found.passed,
            "answered": found.in_time / found.passed,
            "refused": found.refused / found.passed,
            "rows_per_batch": found.rows / max(found.batches, 1),
            "kernel_seconds": found.mean_kernel,
            "p50_seconds": found.median,
            "p99_seconds": found.p99,
            "feeder_late_seconds": found.worst_lateness,
        }

    def close(self) -> None:
        """End all threads.

        Raises:
            RuntimeError: they do not end.
        """
        if not self._direct.stop(10):
            raise RuntimeError("a batch does not end")
        self._worker.stop(5)


def measure_native(
    loaded: Loaded, loads: Sequence[float], seconds: float, variant: Variant = STANDARD
) -> dict[str, Any]:
    """Return all figures of one variant of the dispatcher."""
    (curve,) = loaded.curves.values()
    capacity = curve.capacity_rows_per_second
    with tempfile.TemporaryDirectory() as folder:
        feed = NativeFeed(loaded, Path(folder), variant=variant)
        try:
            lone = feed.lone()
            offered = [{"load": load, **feed.offer(load * capacity, seconds)} for load in loads]
        finally:
            feed.close()
    return {
        "variant": str(variant),
        "sweet_spot_rows": curve.sweet_spot_rows,
        "capacity_rows_per_second": capacity,
        "costs": dict(zip(curve.rows, curve.costs, strict=True)),
        "lone": lone,
        "loads": offered,
    }
