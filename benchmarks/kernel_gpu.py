"""Timing on the GPU: big random buffers, graphs over cold copies, replays in alternating order.

Knows torch and nothing of what is timed. Never changes a setting of the GPU.
"""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_figures import COPY_ALIGN_BYTES

from qlinear_service.kernels import layout

Call = Callable[[], object]
"""Starts one piece of work on the current stream."""

WARMUPS = 3
SPIN_BYTES = 256 << 20
SPIN_SECONDS = 0.3
QUERIED = (
    "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,"
    "temperature.gpu,ecc.mode.current"
)


@dataclass(frozen=True)
class Graph:
    """A recorded graph of `launches` calls."""

    graph: torch.cuda.CUDAGraph
    launches: int


class Gpu:
    """One device, a stream on which all happens, and buffers that live for the whole run."""

    def __init__(self, ordinal: int = 0) -> None:
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # All later work, also that of set-up, is in the order of this one stream.
        torch.cuda.set_stream(self.stream)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._pools: dict[str, torch.Tensor] = {}
        self._moved: torch.Tensor | None = None
        torch.manual_seed(0)

    def copies(self, kind: str, bytes_each: int, count: int) -> list[torch.Tensor]:
        """Return `count` pieces of one large random buffer, each aligned, none overlapping.

        Args:
            kind: "bits" and "more bits" (every byte is a valid code), "float16" and "bfloat16"
                (scales, small and positive), "zeros4" and "zeros8" (zero points), "dense" (float16
                weights).
            bytes_each: of one piece.
            count: of pieces.
        """
        stride = layout.round_up(bytes_each, COPY_ALIGN_BYTES)
        pool = self._pools.get(kind)
        if pool is None or pool.numel() < stride * count:
            self._pools.pop(kind, None)
            del pool
            pool = self._pools[kind] = self._random(kind, stride * count)
        return [pool[i * stride : i * stride + bytes_each] for i in range(count)]

    def _random(self, kind: str, count: int) -> torch.Tensor:
        """Return at least `count` random bytes of a kind."""
        if kind in ("zeros4", "zeros8"):
            most = 16 if kind == "zeros4" else 256
            return torch.randint(0, most, (count,), dtype=torch.uint8, device=self.device)
        if kind in ("bits", "more bits"):
            words = torch.empty(-(-count // 8), dtype=torch.int64, device=self.device)
            return words.random_(-(2**63), 2**63 - 1).view(torch.uint8)
        if kind == "dense":
            values = torch.empty(-(-count // 2), dtype=torch.float16, device=self.device)
            return values.normal_(0, 0.02).view(torch.uint8)
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[kind]
        values = torch.empty(-(-count // 2), dtype=dtype, device=self.device)
        return values.uniform_(0.005, 0.015).view(torch.uint8)

    def forget(self, kind: str) -> None:
        """Give a buffer's memory back."""
        self._pools.pop(kind, None)

    def record(self, calls: Sequence[Call]) -> Graph:
        """Record the calls as one graph, after two of them have run outside of it."""
        for call in calls[:2]:
            call()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        except BaseException:
            end_quietly(graph)
            raise
        graph.capture_end()
        return Graph(graph, len(calls))

    def replay_us(self, recorded: Graph) -> float:
        """Replay a graph once and return the microseconds of one of its launches."""
        self._start.record(self.stream)
        recorded.graph.replay()
        self._stop.record(self.stream)
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) * 1e3 / recorded.launches

    def alternate(
        self, graphs: Mapping[str, Graph], replays: int, warmups: int = WARMUPS
    ) -> dict[str, list[float]]:
        """Return the microseconds of each replay; graphs take turns, to and fro."""
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(warmups + replays):
            names = list(graphs)
            for name in names if number % 2 == 0 else reversed(names):
                taken = self.replay_us(graphs[name])
                if number >= warmups:
                    times[name].append(taken)
        return times

    def spin_up(self, seconds: float = SPIN_SECONDS) -> None:
        """Keep the GPU busy until its clocks have risen.

        By moving memory: large products draw so much power that the clocks fall again (H200: from
        1980 to 1600 MHz), and what is measured next would be measured so.
        """
        if self._moved is None:
            self._moved = torch.zeros(SPIN_BYTES, device=self.device, dtype=torch.uint8)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._moved.add_(1)
            self.stream.synchronize()

    def is_lost(self) -> bool:
        """Say whether a kernel has destroyed the context: nothing works any more then."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False


def end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End the capture of a graph that cannot be finished; why is known already."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


def gpu_state() -> dict[str, str]:
    """Return name, driver, clocks, power and temperature, as nvidia-smi shows them now."""
    command = ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": f"no answer: {error}"}
    values = done.stdout.strip().split(",")
    return dict(zip(QUERIED.split(","), (value.strip() for value in values), strict=False))


def torch_facts() -> dict[str, Any]:
    """Return what torch knows of the device."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_mib": getattr(properties, "L2_cache_size", 0) / (1 << 20),
        "memory_gib": round(properties.total_memory / (1 << 30), 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
