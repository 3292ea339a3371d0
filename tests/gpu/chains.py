"""Chains of layers for tests: what each reads and writes, calls, recordings, and the way taken."""

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem
from gpu.running import COUNTER_BYTES

from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaFlag, CudaLaunch
from qlinear_service.kernels.layout import round_up
from qlinear_service.kernels.torch_types import from_torch

BLOCK = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""(k, n) of a Llama-3-8B block: one launch on an H200, whose 132 thread blocks share it evenly."""

UNEVEN = ((4096, 1536), (1024, 4096), (4096, 7168), (3584, 4096))
"""The same with less for each: the largest shares are 1.15 times the mean, and each is a launch."""


SLOTS_BYTES = 32 << 20
"""kSlotsBytes of csrc/partition.h."""


class Selection(Problem):
    """Each output feature is one of the input features, or minus it: exact through any chain."""

    def _integers(self, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        if len(shape) == 1 or high != 15:
            return super()._integers(shape, low, high)
        k, n = shape
        codes = torch.full(shape, 8, dtype=torch.int8, device=self.device)
        self.chosen = torch.randint(0, k, (n,), generator=self.draw, device=self.device)
        self.signs = super()._integers((n,), 0, 1) * 2 - 1
        codes[self.chosen, torch.arange(n, device=self.device)] = 8 + self.signs
        return codes

    def _scales(self, shape: tuple[int, int], exact: bool) -> torch.Tensor:
        return torch.ones(shape, device=self.device)

    def selected(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is right, of x's dtype."""
        return x[:, self.chosen] * self.signs.to(x.dtype)


class Chain:
    """Problems one after the other, each reading the first columns of what the last one wrote.

    Args:
        kernels: what computes.
        problems: the layers.
        x: what the first one reads, [m, k].
        shared: all layers read the first columns of `x`.
        dtype: of results; that of `x` if it is not given.
        y_gap: elements between rows of results, or one to seven more.
        aligned: those seven: rows of results begin at multiples of 16 bytes, as those of x must.
    """

    def __init__(
        self,
        kernels: RecordingKernels,
        problems: Sequence[Problem],
        x: torch.Tensor,
        *,
        shared: bool = False,
        dtype: torch.dtype | None = None,
        y_gap: int = 0,
        aligned: bool = False,
    ) -> None:
        self.kernels, self.problems, self.x = kernels, problems, x
        self.xs: list[torch.Tensor] = []
        self.ys: list[torch.Tensor] = []
        self.rooms: list[torch.Tensor] = []
        """Results with what lies between their rows."""
        self.params = (LinearParams * len(problems))()
        source = x
        for place, problem in enumerate(problems):
            n, k = problem.logical.spec.n, problem.logical.spec.k
            stride = n + y_gap
            room = (len(x), round_up(stride, 8) if aligned else stride)
            self.rooms.append(torch.empty(room, dtype=dtype or x.dtype, device=x.device))
            self.params[place] = kernels._params_of(problem.layer)
            self.xs.append(source[:, :k])
            self.ys.append(self.rooms[-1][:, :n])
            self.reads(place, source)
            self.writes(place, self.ys[-1])
            source = x if shared else self.ys[-1]
        size = kernels.library.ql_cuda_workspace_bytes()
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=x.device)
        self.scratch.fill_(0xFF)

    def reads(self, place: int, x: torch.Tensor) -> None:
        """Have a layer read the first columns of `x`."""
        params = self.params[place]
        params.x, params.m, params.x_row_stride = x.data_ptr(), len(x), x.stride(0)
        params.x_dtype = from_torch(x.dtype)

    def writes(self, place: int, y: torch.Tensor) -> None:
        """Have a layer write to `y`."""
        params = self.params[place]
        params.y, params.y_row_stride = y.data_ptr(), y.stride(0)
        params.y_dtype = from_torch(y.dtype)

    @property
    def scratch(self) -> torch.Tensor:
        """Where thread blocks of other kernels leave their shares of tiles."""
        return self.workspace[COUNTER_BYTES : COUNTER_BYTES + SLOTS_BYTES]

    def assert_settled(self) -> None:
        """Fail if a launch has left counters behind."""
        left = self.workspace[:COUNTER_BYTES].view(torch.int32).nonzero()
        assert not len(left), f"{len(left)} counters are left behind, the first is {left[0]}"

    def launches(self) -> list[int]:
        """Return how many layers each launch computes, without plans and flags."""
        lengths: list[int] = []
        while (place := sum(lengths)) < len(self.params):
            rest = ctypes.pointer(self.params[place])
            count, info = len(self.params) - place, self.kernels.info
            lengths.append(self.kernels.library.ql_cuda_chain_length(rest, count, info) or 1)
        return lengths

    def launch(self, flags: CudaFlag = CudaFlag.NONE) -> CudaLaunch:
        """Return where and how it runs."""
        return CudaLaunch(
            device=self.x.device.index or 0,
            flags=flags,
            stream=torch.cuda.current_stream(self.x.device).cuda_stream,
            workspace=self.workspace.data_ptr(),
            workspace_bytes=self.workspace.numel(),
        )

    def call(self, flags: CudaFlag = CudaFlag.NONE) -> None:
        """Run all in one call."""
        library, count = self.kernels.library, len(self.params)
        status = library.ql_cuda_linear_chain(self.params, None, count, self.launch(flags))
        assert status == 0, library.ql_cuda_error_text()

    def one_by_one(self, flags: CudaFlag = CudaFlag.NONE) -> list[torch.Tensor]:
        """Return what separate calls write, each after the end of the one before."""
        for params in self.params:
            assert self.kernels.library.ql_cuda_linear(params, self.launch(flags)) == 0
            torch.cuda.synchronize()
        return self.results()

    def results(self) -> list[torch.Tensor]:
        """Return copies of what has been written."""
        return [y.clone() for y in self.ys]

    def spoil(self) -> None:
        """Fill all results, and what lies between their rows, with NaN."""
        for room in self.rooms:
            room.fill_(math.nan)

    @contextmanager
    def recorded(self) -> Iterator[ctypes.c_void_p]:
        """Yield the chain as a graph that was recorded on a stream of its own."""
        library, handle = self.kernels.library, ctypes.c_void_p()
        with torch.cuda.stream(torch.cuda.Stream(self.x.device)):
            status = library.ql_cuda_record_chain(
                self.params, None, len(self.params), self.launch(), ctypes.byref(handle)
            )
        assert status == 0, library.ql_cuda_error_text()
        try:
            yield handle
            torch.cuda.synchronize()
        finally:
            library.ql_cuda_free_chain(handle)

    def replay(self, handle: ctypes.c_void_p) -> None:
        """Launch what was recorded on torch's current stream."""
        library = self.kernels.library
        assert library.ql_cuda_launch_chain(handle, self.launch()) == 0, (
            library.ql_cuda_error_text()
        )


def block_of(
    kernels: RecordingKernels,
    form: Form,
    shapes: Sequence[tuple[int, int]] = BLOCK,
) -> list[Problem]:
    """Return layers of these (k, n) with numbers of every kind."""
    return [
        Problem(kernels.device, n, k, form, exact=False, seed=place)
        for place, (k, n) in enumerate(shapes)
    ]


def small_x(
    problems: Sequence[Problem], m: int, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """Return activations whose products stay finite through a block."""
    return (problems[0].normal_x(m) / 64).to(dtype)


def form_of(dtype: torch.dtype, group_size: int = 128, bias: torch.dtype | None = None) -> Form:
    """Return a form that the kernel knows beside such activations."""
    return Form(group_size=group_size, scale_dtype=from_torch(dtype), bias=bias)


def skip_unless_even(kernels: RecordingKernels) -> None:
    """Leave a test whose layers are one launch only where they are shared out evenly."""
    if kernels.info.major != 9 or kernels.info.sm_count != 132:
        pytest.skip("shapes here are shared out evenly by Hopper GPUs of 132 multiprocessors")
