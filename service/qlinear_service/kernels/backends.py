"""The kernel library as Python sees it: ctypes over csrc/linear_params.h, or plain torch.

ctypes releases the interpreter lock during a call, so the event loop runs on while a batch is
computed. Both classes answer the same two questions: what am I, and what is y.
"""

import ctypes
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import BuildError
from qlinear_service.kernels import build, layout, unquantized
from qlinear_service.kernels.abi import CpuBody, GatherParams, LinearParams
from qlinear_service.kernels.layer_params import layer_params
from qlinear_service.kernels.torch_kernels import INVARIANT, SAMPLE_ROWS, TorchKernels
from qlinear_service.kernels.torch_types import from_torch, to_torch
from qlinear_service.layers import UNQUANTIZED_BITS, QuantizedLinear

__all__ = ["CpuBody", "CpuKernels", "Kernels", "TorchKernels", "load_kernels"]


class Kernels(Protocol):
    """Whatever multiplies: the engine knows no more than this."""

    name: str
    """Short, for metrics and logs: "cpu" or "torch"."""
    description: str
    """One sentence for people."""

    def path_rows(self, bits: int) -> tuple[int, ...]:
        """Return row counts that together take every path of `linear` for codes of `bits`."""
        ...

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        """Return y [m, n] of `output_dtype` for x [m, k]; rows of x are contiguous."""
        ...

    def read(self, buffer: torch.Tensor, *, passes: int, threads: int) -> None:
        """Read `buffer`, contiguous int64, `passes` times as fast as the device can."""
        ...


SLAB_ROWS: Mapping[CpuBody, int] = {CpuBody.PLAIN: 8, CpuBody.AVX2: 512}
"""From so many rows on, torch's float32 product of dequantized slabs beats that body; the AVX-512
bodies are never beaten (measured: docs/performance.md)."""

TWO_CHUNKS_ROWS = 64 + SAMPLE_ROWS
"""kRowChunk of csrc/cpu/linear.cpp, and some more: rows that are prepared in two steps."""

SLAB_FEATURES = 64
"""Output features dequantized at a time: 1 MiB at k = 4096, an eighth of the packed layer, and as
fast as any larger slab."""


class CpuKernels:
    """The compiled CPU kernels.

    Args:
        library_path: what `build.build_cpu_library` returned.
        threads: most OpenMP threads of one call.
        body: which body computes; BEST is the fastest that this processor can run.
        slab_rows: for each body, from how many rows on slabs are dequantized for torch instead.
        batch_invariant: no bit of a row's result depends on the other rows, so no slabs.

    Raises:
        BuildError: the file is no fitting library.
    """

    name = "cpu"

    def __init__(
        self,
        library_path: Path,
        *,
        threads: int,
        body: CpuBody = CpuBody.BEST,
        slab_rows: Mapping[CpuBody, int] = SLAB_ROWS,
        batch_invariant: bool = False,
    ) -> None:
        try:
            self._library = ctypes.CDLL(str(library_path))
            status_text = self._library.ql_status_text
        except (OSError, AttributeError) as error:
            raise BuildError(f"cannot load the CPU kernels {library_path}: {error}") from error
        status_text.restype = ctypes.c_char_p
        self._status_text = status_text
        self._threads = threads
        self.body = body
        self._slab_rows = {} if batch_invariant else slab_rows
        self._batch_invariant = batch_invariant
        self._known: WeakKeyDictionary[QuantizedLinear, LinearParams] = WeakKeyDictionary()
        names = [f"{self._body_for(bits).name} for {bits} bits" for bits in layout.BITS]
        self.description = f"CPU kernels, {' and '.join(names)}, at most {threads} threads"
        self.description += INVARIANT * batch_invariant
        found = (
            self._library.ql_layout_version(),
            self._library.ql_linear_params_bytes(),
            self._library.ql_gather_params_bytes(),
        )
        expected = (layout.VERSION, ctypes.sizeof(LinearParams), ctypes.sizeof(GatherParams))
        if found != expected:
            raise BuildError(
                f"{library_path} has layout version and struct sizes {found}, expected {expected}; "
                "delete it and start again, it will be rebuilt"
            )

    def path_rows(self, bits: int) -> tuple[int, ...]:
        """Return row counts that together take every path of `linear` for codes of `bits`."""
        if bits == UNQUANTIZED_BITS:
            return (SAMPLE_ROWS,)
        rows, slab_rows = (SAMPLE_ROWS, TWO_CHUNKS_ROWS), self._slab_rows.get(self._body_for(bits))
        if slab_rows is None:
            return rows
        # Where slabs begin early, the body never computes more rows than come before them.
        return (*sorted({min(m, max(slab_rows - 1, 1)) for m in rows}), slab_rows)

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        """Return y [m, n] of `output_dtype` for x [m, k]; rows of x are contiguous."""
        spec = layer.spec
        if x.stride(-1) != 1 and x.numel() > 0:
            raise ValueError(f"rows of x must be contiguous; strides are {x.stride()}")
        if not spec.quantized:
            return unquantized.linear(layer, x, output_dtype, row_by_row=self._batch_invariant)
        x = _separate_rows(x)
        if layer.k_permutation is not None:
            x = self.gather(x, layer.k_permutation)
        y = torch.empty((x.shape[0], spec.n), dtype=to_torch(output_dtype))
        params = LinearParams.from_buffer_copy(self._params_of(layer))
        slab_rows = self._slab_rows.get(self._body_for(spec.bits))
        if slab_rows is not None and x.shape[0] >= slab_rows:
            self._multiply_slabs(layer, params, x, y)
            return y
        params.x, params.y, params.m = x.data_ptr(), y.data_ptr(), x.shape[0]
        params.x_row_stride, params.y_row_stride = max(x.stride(0), spec.k), spec.n
        params.x_dtype, params.y_dtype = from_torch(x.dtype), output_dtype
        status = self._library.ql_cpu_linear(ctypes.byref(params))
        self._check(status, f"linear m={x.shape[0]} {spec.shape}")
        return y

    def _params_of(self, layer: QuantizedLinear) -> LinearParams:
        """Return `_params`, made once for each layer: filling it in costs like a small call."""
        params = self._known.get(layer)
        if params is None:
            params = self._known[layer] = self._params(layer)
        return params

    def _params(self, layer: QuantizedLinear) -> LinearParams:
        """Return what the library must know of `layer`; activations are still to be filled in."""
        params = layer_params(layer, threads=self._threads)
        params.body = self.body
        return params

    def _multiply_slabs(
        self, layer: QuantizedLinear, params: LinearParams, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Fill y with the products of x and slabs of float32 weights."""
        spec = layer.spec
        if x.dtype == torch.float32:
            x = x.to(to_torch(spec.compute_dtype))
        wide = x.float()
        slab = torch.empty((SLAB_FEATURES, spec.k))
        for begin in range(0, spec.n, SLAB_FEATURES):
            count = min(SLAB_FEATURES, spec.n - begin)
            status = self._library.ql_cpu_dequantize(
                ctypes.byref(params),
                ctypes.c_int64(begin),
                ctypes.c_int64(count),
                ctypes.c_void_p(slab.data_ptr()),
            )
            self._check(status, f"dequantize n={begin}:{begin + count} {spec.shape}")
            product = wide @ slab[:count].T
            if layer.bias is not None:
                product += layer.bias[begin : begin + count].float()
            y[:, begin : begin + count] = product

    def gather(self, x: torch.Tensor, k_permutation: torch.Tensor) -> torch.Tensor:
        """Return x [m, k] with column i taken from column k_permutation[i]."""
        x = _separate_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        params = GatherParams(
            x=x.data_ptr(),
            permutation=k_permutation.data_ptr(),
            out=out.data_ptr(),
            m=x.shape[0],
            k=x.shape[1],
            x_row_stride=max(x.stride(0), x.shape[1]),
            item_bytes=x.element_size(),
            threads=self._threads,
        )
        status = self._library.ql_cpu_gather(ctypes.byref(params))
        self._check(status, f"gather m={x.shape[0]} k={x.shape[1]}")
        return out

    def pack_codes(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        """Do what `packing.pack_codes` does, for codes [k_padded, n_padded] on the host."""
        k, n = codes.shape
        codes = codes.contiguous()
        tiles = (n // layout.TILE_N, k // layout.TILE_K, layout.tile_bytes(bits))
        packed = torch.empty(tiles, dtype=torch.uint8)
        status = self._library.ql_cpu_pack_codes(
            ctypes.c_void_p(codes.data_ptr()),
            ctypes.c_int64(n),
            ctypes.c_int64(k),
            ctypes.c_int64(n),
            bits,
            ctypes.c_void_p(packed.data_ptr()),
            self._threads,
        )
        self._check(status, f"pack k={k} n={n} bits={bits}")
        return packed

    def read(self, buffer: torch.Tensor, *, passes: int, threads: int) -> None:
        """Read `buffer`, contiguous int64, `passes` times as fast as the device can."""
        nbytes = buffer.numel() * buffer.element_size()
        self._library.ql_cpu_read_probe(
            ctypes.c_void_p(buffer.data_ptr()), ctypes.c_int64(nbytes), passes, threads
        )

    def _body_for(self, bits: int) -> CpuBody:
        if self.body is not CpuBody.BEST:
            return self.body
        return CpuBody(self._library.ql_cpu_best_body(bits))

    def _check(self, status: int, operation: str) -> None:
        if status != 0:
            text = self._status_text(status).decode()
            raise RuntimeError(f"{operation}: {text} (status {status})")


def load_kernels(
    *,
    cache_dir: Path,
    threads: int,
    torch_only: bool = False,
    batch_invariant: bool = False,
    stop: threading.Event | None = None,
) -> Kernels:
    """Return the best CPU kernels this machine can have.

    Args:
        cache_dir: where built libraries are kept.
        threads: most threads of one call.
        torch_only: use plain torch even where a library could be built.
        batch_invariant: no bit of a row's result may depend on the other rows.
        stop: set when nobody wants the kernels any more.

    Raises:
        BuildError: a compiler is there but the sources do not compile, or it was stopped. A
            missing compiler is no error: the torch path answers, and its description says so.
    """
    if torch_only:
        return TorchKernels(batch_invariant=batch_invariant)
    try:
        with build.cpu_library(cache_dir, stop=stop) as library_path:
            return CpuKernels(library_path, threads=threads, batch_invariant=batch_invariant)
    except build.ToolMissing as error:
        return TorchKernels(instead=str(error), batch_invariant=batch_invariant)


def _separate_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [m, k], copied if its rows overlap, as those of an expanded tensor do."""
    return x.contiguous() if x.shape[0] > 1 and x.stride(0) < x.shape[1] else x
