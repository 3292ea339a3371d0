"""How fast a GPU reads: the floor that nothing which reads the same bytes can beat.

There are several read kernels, for which of them is fastest depends on the size.
"""

import math
from collections.abc import Sequence

import torch

from qlinear_service.kernels.cuda_abi import CudaLaunch
from qlinear_service.kernels.cuda_runtime import CudaRuntime

__all__ = ["Reads"]

TRIES = 5
SINK_BYTES = 256


class Reads:
    """The read kernels of one device, all on the stream for such things.

    Args:
        runtime: the device.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._stream = runtime.probe_stream
        self._sink = runtime.allocate((SINK_BYTES,), torch.uint8, "read")
        self._best: dict[int, int] = {}

    def read(self, buffer: torch.Tensor, passes: int) -> None:
        """Read `buffer`, contiguous, `passes` times with the fastest kernel, and wait."""
        nbytes = buffer.numel() * buffer.element_size()
        if nbytes not in self._best:
            self._best[nbytes] = self.fastest(buffer, nbytes)[1]
        self.launch([buffer.data_ptr()] * passes, nbytes, self._best[nbytes], self._stream)
        self._runtime.wait(self._stream)

    def fastest(self, memory: torch.Tensor, nbytes: int) -> tuple[float, int]:
        """Return the shortest time in which `nbytes` were read, and the number of that kernel.

        Reads one piece of `memory` after the other inside one CUDA graph, where a launch costs
        least; with several times the L2 cache the pieces are cold.

        Args:
            memory: contiguous, on the device, already written.
            nbytes: a multiple of 16, at most all of `memory`.
        """
        pieces = memory.numel() * memory.element_size() // nbytes
        addresses = [memory.data_ptr() + piece * nbytes for piece in range(pieces)]
        self._stream.wait_stream(torch.cuda.current_stream(self._runtime.device))
        variants = range(self._runtime.library.ql_cuda_read_variants())
        with self._runtime.on(self._stream):
            times = [self._seconds(addresses, nbytes, variant) for variant in variants]
        best = min(times)
        return best / pieces, times.index(best)

    def _seconds(self, addresses: Sequence[int], nbytes: int, variant: int) -> float:
        """Return the shortest time of reading at all `addresses` once."""
        self.launch(
            addresses[:1], nbytes, variant, self._stream
        )  # its machine code is loaded by now
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        self.launch(addresses, nbytes, variant, self._stream)
        graph.capture_end()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        best = math.inf
        for _ in range(TRIES):
            start.record(self._stream)
            graph.replay()
            stop.record(self._stream)
            self._runtime.wait(self._stream)
            best = min(best, start.elapsed_time(stop) / 1e3)
        return best

    def launch(
        self, addresses: Sequence[int], nbytes: int, variant: int, stream: torch.cuda.Stream
    ) -> None:
        """Read `nbytes` at each of `addresses` on `stream`, with that kernel; wait for nothing."""
        launch = CudaLaunch(device=self._runtime.ordinal, stream=stream.cuda_stream)
        for address in addresses:
            status = self._runtime.library.ql_cuda_read_probe(
                address, nbytes, variant, self._sink.data_ptr(), launch
            )
            self._runtime.check(status, f"read of {nbytes} bytes")
