"""The GPU kernels as Python sees them: ctypes over csrc/linear_cuda.h, on tensors of one device.

Nothing here computes with torch: what the library cannot do is an error of that call, never a
slower path. Streams, workspaces and errors: cuda_runtime.py; read rates: cuda_reads.py.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import GatherParams, LinearParams
from qlinear_service.kernels.cuda_abi import CudaFlag, CudaPlan, Status
from qlinear_service.kernels.cuda_plans import CudaPlans
from qlinear_service.kernels.cuda_reads import Reads
from qlinear_service.kernels.cuda_runtime import CudaRuntime, DeviceLost, Events, named
from qlinear_service.kernels.known_layers import KnownLayers
from qlinear_service.kernels.planner import Planner
from qlinear_service.kernels.torch_types import from_torch, to_torch
from qlinear_service.kernels.tuned_plans import TunedPlans
from qlinear_service.kernels.tuned_table import Table
from qlinear_service.layers import QuantizedLinear

__all__ = ["CudaKernels", "DeviceLost", "Events"]

ROWS_TRIED = (1, 5, 13, 29, 61, 77, 189, 250, 510, 1030)
"""Ragged ends of tiles of every height, several tiles, and what large products may take."""


class CudaKernels:
    """The compiled GPU kernels on one device.

    Launches return before the GPU has computed: `wait` waits, and says what failed on the way.
    Graphs captured on one stream share that stream's workspace: replay them one after the other.

    Args:
        library_path: the built library.
        device: CUDA ordinal.
        batch_invariant: a row's result depends on neither m nor the other rows; costs time.
        dependent: weights are fetched before the kernel in front has ended (sm_90 and later).
        spare_workspaces: how many streams may begin with a graph capture.
        tables: measured plans, those that win first; not used where `batch_invariant`.

    Raises:
        BuildError: the file is no fitting library, or it cannot serve that GPU.
    """

    name = "cuda"
    runtime_class = CudaRuntime

    def __init__(
        self,
        library_path: Path,
        *,
        device: int = 0,
        batch_invariant: bool = False,
        dependent: bool = False,
        spare_workspaces: int = 2,
        tables: Sequence[Table] = (),
    ) -> None:
        flags = CudaFlag.BATCH_INVARIANT if batch_invariant else CudaFlag.NONE
        flags |= CudaFlag.DEPENDENT if dependent else CudaFlag.NONE
        self.runtime = self.runtime_class(
            library_path, device=device, flags=flags, spare_workspaces=spare_workspaces
        )
        self.batch_invariant = batch_invariant
        self.library, self.info = self.runtime.library, self.runtime.info
        self.device = self.runtime.device
        built_with = self.info.runtime_version
        self.description = (
            f"CUDA kernels on {named(self.info)}, {self.info.sm_count} multiprocessors, built with "
            f"CUDA {built_with // 1000}.{built_with % 1000 // 10}"
            + ", batch-invariant"
            * batch_invariant
        )
        tuned = TunedPlans(tables, Planner(self.library), self.info, flags)
        self._plans = CudaPlans(self.runtime, tuned)
        self.known = KnownLayers(tuned)
        """What is worked out once for each layer."""
        self._reads = Reads(self.runtime)

    def to_device(self, layer: QuantizedLinear) -> QuantizedLinear:
        """Return `layer` with all its tensors on this device, which `linear` asks for.

        Waits for its scales and reads them once, so that no launch has to.
        """
        optional = ("zeros", "bias", "k_permutation")
        tensors = {name: getattr(layer, name) for name in optional}
        moved = dataclasses.replace(
            layer,
            qweight=layer.qweight.to(self.device),
            scales=layer.scales.to(self.device),
            **{name: t.to(self.device) for name, t in tensors.items() if t is not None},
        )
        if moved.scales.is_cuda:
            self.known.of(moved, self.device)
        return moved

    def path_rows(self, bits: int) -> tuple[int, ...]:
        """Return row counts that together take every path of `linear` for codes of `bits`."""
        rows_of: dict[tuple[int, ...], int] = {}
        for rows in ROWS_TRIED:
            params = LinearParams(
                n=4096, k=4096, group_size=128, bits=bits, scale_dtype=DType.F16,
                compute_dtype=DType.F16, bias_dtype=DType.F16, threads=1, weights_fit=1,
            )  # fmt: skip
            plan = self._plans.whole(params, rows, DType.F16, DType.F16)
            path = (plan.kernel, plan.token_blocks, plan.whole_tiles, plan.m_tiles > 1)
            rows_of.setdefault(path, rows)
        return tuple(rows_of.values())

    def plan(
        self, layer: QuantizedLinear, rows: int, x_dtype: DType, output_dtype: DType
    ) -> CudaPlan:
        """Return how batches cut such a product; launches nothing.

        `linear` does so, too, unless multiprocessors are to be left alone.
        """
        params = LinearParams.from_buffer_copy(self._params_of(layer))
        return self._plans.leaving(params, rows, x_dtype, output_dtype)

    def leave(self, multiprocessors: int) -> None:
        """Let each `plan` from now on leave so many multiprocessors to other kernels; 0: none."""
        self._plans.leave(multiprocessors)

    def linear(
        self,
        layer: QuantizedLinear,
        x: torch.Tensor,
        output_dtype: DType,
        *,
        out: torch.Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
        events: Events | None = None,
    ) -> torch.Tensor:
        """Return y [m, n] of `output_dtype` for x [m, k]; rows of x are contiguous.

        Args:
            layer: on this device, see `to_device`.
            x: on this device.
            output_dtype: of y.
            out: where y goes, rows contiguous; None allocates it. Nothing else is allocated but
                the permuted x of an act-order layer.
            stream: None is torch's current one.
            events: recorded around the product alone, without the gather of an act-order layer.

        Raises:
            ValueError: x, out or the layer is elsewhere, or x or out has another form.
            RuntimeError: the launch failed, or there is no memory for y; the next call may succeed.
            DeviceLost: nothing will succeed any more.
        """
        spec, known = layer.spec, self.known.of(layer, self.device)
        params = LinearParams.from_buffer_copy(known.params)
        x = self._checked_x(x, spec.k)
        params.x_dtype, params.y_dtype = from_torch(x.dtype), output_dtype
        m = x.shape[0]
        operation = f"linear m={m} {spec.shape}"
        with self.runtime.on(stream) as used:
            if out is None:
                y = self.runtime.allocate((m, spec.n), to_torch(output_dtype), operation)
            else:
                y = self._checked_out(out, (m, spec.n), to_torch(output_dtype))
            if m == 0:
                return y
            params.m = m
            plan = None if known.plans is None else known.plans.plan(params)
            launch = self.runtime.launch(used, operation, events, plan)
            if layer.k_permutation is not None:
                x = self._gather(x, layer.k_permutation, used)
        params.x, params.y = x.data_ptr(), y.data_ptr()
        params.x_row_stride, params.y_row_stride = _row_stride(x), _row_stride(y)
        status = self.library.ql_cuda_linear(params, launch)
        if status == Status.BAD_PLAN and plan is not None:  # rows of this x cannot be copied so
            launch.plan = None
            status = self.library.ql_cuda_linear(params, launch)
        self.runtime.check(status, operation, used)
        return y

    def gather(self, x: torch.Tensor, k_permutation: torch.Tensor) -> torch.Tensor:
        """Return x [m, k] with column i taken from column k_permutation[i]."""
        with self.runtime.on(None) as used:
            return self._gather(self._checked_x(x, len(k_permutation)), k_permutation, used)

    def _gather(
        self, x: torch.Tensor, k_permutation: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.Tensor:
        m, k = x.shape
        operation = f"gather m={m} k={k}"
        out = self.runtime.allocate((m, k), x.dtype, operation)
        if m > 0:
            params = GatherParams(
                x=x.data_ptr(),
                permutation=k_permutation.data_ptr(),
                out=out.data_ptr(),
                m=m,
                k=k,
                x_row_stride=_row_stride(x),
                item_bytes=x.element_size(),
                threads=1,
            )
            launch = self.runtime.launch(stream, operation)
            self.runtime.check(self.library.ql_cuda_gather(params, launch), operation, stream)
        return out

    def dequantize(
        self, layer: QuantizedLinear, dtype: DType, *, begin: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """Return the weights [end - begin, k] of output features `begin` to `end`, rounded once.

        Columns of an act-order layer come in the order of its codes.

        Args:
            layer: on this device.
            dtype: of the weights.
            begin: a multiple of 16.
            end: None is n.
        """
        spec = layer.spec
        count = (spec.n if end is None else end) - begin
        operation = f"dequantize n={begin}:{begin + count} {spec.shape}"
        params = self._params_of(layer)
        with self.runtime.on(None) as used:
            launch = self.runtime.launch(used, operation)
            weights = self.runtime.allocate((count, spec.k), to_torch(dtype), operation)
        status = self.library.ql_cuda_dequantize(
            params, begin, count, dtype, weights.data_ptr(), launch
        )
        self.runtime.check(status, operation, used)
        return weights

    def read(self, buffer: torch.Tensor, *, passes: int, threads: int) -> None:
        """Read `buffer`, contiguous and on this device, `passes` times, and wait for the end.

        `threads` is for kernels on a CPU.
        """
        self._reads.read(buffer, passes)

    def occupy(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Keep `stream` busy with one read of contiguous `memory`; does not wait for it."""
        self._reads.launch([memory.data_ptr()], memory.nbytes, 0, stream)

    def read_seconds(self, memory: torch.Tensor, nbytes: int) -> float:
        """Return the shortest time in which `nbytes` can be read: see `Reads.fastest`."""
        return self._reads.fastest(memory, nbytes)[0]

    def prepare(self, stream: torch.cuda.Stream) -> None:
        """Make the workspace of `stream`; needed before a capture where no spare one is left."""
        with self.runtime.on(stream) as used:
            self.runtime.launch(used, "prepare")

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait for all work of `stream`, by default torch's current one.

        Raises:
            DeviceLost: a kernel failed on the way; no result is worth anything.
        """
        self.runtime.wait(stream)

    def _checked_x(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """Return x, copied if its rows overlap, as those of an expanded tensor do."""
        if x.dim() != 2 or x.shape[1] != k or x.device != self.device:
            raise ValueError(
                f"x is {list(x.shape)} on {x.device}; expected [m, {k}] on {self.device}"
            )
        if x.stride(1) != 1 and k > 1 and x.shape[0] > 0:
            raise ValueError(f"rows of x must be contiguous; strides are {x.stride()}")
        return x.contiguous() if x.shape[0] > 1 and x.stride(0) < k else x

    def _checked_out(
        self, out: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        if tuple(out.shape) != shape or out.dtype != dtype or out.device != self.device:
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)} on {out.device}; expected {dtype} "
                f"{list(shape)} on {self.device}"
            )
        rows, columns = shape
        one_after_the_other = rows < 2 or out.stride(0) >= columns
        if (out.stride(1) != 1 and columns > 1) or not one_after_the_other:
            raise ValueError(f"rows of out must be contiguous; strides are {out.stride()}")
        return out

    def _params_of(self, layer: QuantizedLinear) -> LinearParams:
        """Return what the library must know of `layer`, made once for each."""
        return self.known.of(layer, self.device).params


def _row_stride(rows: torch.Tensor) -> int:
    """Return the elements from one row to the next; a single row may claim any."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
