"""Launches every kernel once or twice on tiny layers, for compute-sanitizer; checks the results.

    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py LIBRARY
    compute-sanitizer --tool racecheck python3 tests/gpu/sanitize.py LIBRARY 0 14

The numbers are the first kernel and the one to stop before; behind the library's own come those of
chains (sanitize_chains.py). No pytest and no torch (bare.py). Prints how many launches were right;
exits with 1 if one was not.
"""

import ctypes
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "service"))

from gpu.bare import COUNTER_BYTES, Memory, drawn_layer, encoded, rounded
from gpu.formats import ARRANGEMENTS, Kernel, kernels_of
from gpu.sanitize_chains import chains_of, launch_chain

from qlinear_service.dtypes import DType
from qlinear_service.kernels import cuda_abi, layout
from qlinear_service.kernels.abi import GatherParams, LinearParams
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaLaunch, CudaPlan, Status


@dataclass(frozen=True)
class Case:
    """One launch: a kernel's format with sizes, dtypes and a plan that make it work hard."""

    params: LinearParams
    plans: list[CudaPlan]
    """The first that this GPU can run is taken."""
    zeros: bool
    bias: bool


def cases_of(kernel: Kernel) -> list[Case]:
    """Whole tiles with ragged ends, and tiles that three thread blocks share."""
    rows = 8 * kernel.token_blocks
    cases = []
    for n, k, m, whole in ((70, 200, rows + 3, 1), (64, 1024, rows - 3, 0)):
        scale_dtype = DType.F16 if whole else DType.F32
        params = LinearParams(
            m=m, n=n, k=k, x_row_stride=k, y_row_stride=n + (3 if whole else 0), threads=1,
            group_size=kernel.group_size, bits=kernel.bits, compute_dtype=kernel.dtype,
            x_dtype=kernel.dtype, scale_dtype=kernel.dtype if kernel.rounds else scale_dtype,
            y_dtype=kernel.dtype if kernel.rounds else DType.F16 if whole else DType.F32,
            bias_dtype=DType.BF16,
            weights_fit=1,
        )  # fmt: skip
        if whole and not kernel.marks and kernel.dtype == DType.F16:
            params.x_dtype = DType.F32  # converted on its way, which the copy engine cannot do
        ctas = 2 if whole else 3
        plans = [kernel.plan(warps=warps, stages=2, ctas=ctas, whole_tiles=whole)
                 for warps in ARRANGEMENTS]  # fmt: skip
        cases.append(Case(params, plans, zeros=not whole, bias=bool(whole)))
    return cases


def launch_and_compare(library: ctypes.CDLL, memory: Memory, case: Case) -> str:
    """Return "" or what is wrong."""
    params, draw = LinearParams.from_buffer_copy(case.params), np.random.default_rng(0)
    m, n, k = params.m, params.n, params.k
    layer = drawn_layer(draw, params, zeros=case.zeros)
    bias = draw.integers(-9, 9, n).astype(np.float32)
    x = draw.integers(-2, 3, (m, k)).astype(np.float32)
    expected = x @ layer.weights.T + (bias if case.bias else 0)

    params.x, params.qweight = memory.put(encoded(x, params.x_dtype)), memory.put(layer.qweight)
    params.scales = memory.put(encoded(layer.scales, params.scale_dtype))
    params.zeros = memory.put(layer.zeros) if case.zeros else None
    params.bias = memory.put(encoded(bias, params.bias_dtype)) if case.bias else None
    right = rounded(expected, params.y_dtype)
    y = np.empty((m, params.y_row_stride), right.dtype)
    params.y = memory.take(y.nbytes - (params.y_row_stride - n) * y.itemsize)
    nbytes = library.ql_cuda_workspace_bytes()
    launch = CudaLaunch(device=0, workspace=memory.take(nbytes), workspace_bytes=nbytes)
    memory.clear(launch.workspace, COUNTER_BYTES)
    status = int(Status.BAD_PLAN)
    for plan in case.plans:
        if status == Status.BAD_PLAN:
            launch.plan = ctypes.pointer(plan)
            status = library.ql_cuda_linear(params, launch)
    if status != Status.OK:
        return f"status {status}: {library.ql_cuda_error_text().decode()}"
    # Row by row: what lies between them is written by nobody.
    row_bytes = params.y_row_stride * y.itemsize
    got = np.stack([memory.get(params.y + i * row_bytes, y[0, :n]) for i in range(m)])
    wrong = got != right
    return f"{wrong.sum()} of {wrong.size} are wrong" if wrong.any() else ""


def run_helpers(library: ctypes.CDLL, memory: Memory) -> None:
    """Launch the gather, the dequantization and the read kernels."""
    launch = CudaLaunch(device=0)
    x, order = np.arange(3 * 77, dtype=np.float32).reshape(3, 77), np.arange(77)[::-1]
    for array in (x, x.astype(np.float16)):
        gather = GatherParams(
            x=memory.put(array), permutation=memory.put(order.astype(np.int32)),
            out=memory.take(array.nbytes), m=3, k=77, x_row_stride=77, item_bytes=array.itemsize,
        )  # fmt: skip
        assert library.ql_cuda_gather(gather, launch) == Status.OK
        assert (memory.get(gather.out, array) == array[:, order]).all()
    for bits, dtype in itertools.product((4, 8), DType):
        params = LinearParams(
            n=70, k=200, group_size=32, bits=bits, x_dtype=1, y_dtype=1, compute_dtype=1,
            scale_dtype=3, bias_dtype=1, scales=memory.put(np.ones((8, 8, 16), np.float32)),
            qweight=memory.put(np.full(layout.qweight_bytes(128, 256, bits), 255, np.uint8)),
        )  # fmt: skip
        out = encoded(np.full((54, 200), 2 ** (bits - 1) - 1, np.float32), dtype)
        address = memory.take(out.nbytes)
        status = library.ql_cuda_dequantize(params, 16, 54, dtype, address, launch)
        assert status == Status.OK, status
        assert (memory.get(address, out) == out).all()
    buffer, sink = memory.put(np.ones(100_000, np.int64)), memory.take(64)
    for variant in range(library.ql_cuda_read_variants()):
        status = library.ql_cuda_read_probe(buffer, 800_000, variant, sink, launch)
        assert status == Status.OK, status
    memory.get(buffer, np.ones(1))


def main() -> int:
    """Run what the command line names."""
    library = cuda_abi.declare(ctypes.CDLL(sys.argv[1]))
    assert cuda_abi.sizes(library) == cuda_abi.expected_sizes(), "another version of the library"
    first, last = (int(word) for word in (*sys.argv[2:], 0, 1 << 30)[:2])
    device, memory = CudaDevice(), Memory()
    assert library.ql_cuda_device_info(0, device) == Status.OK
    right, faults = 0, []
    kernels = kernels_of(library)
    for kernel in kernels[first:last]:
        for case in cases_of(kernel) if kernel.runs_on(device) else ():
            fault = launch_and_compare(library, memory, case)
            memory.give_back()
            right += not fault
            tiles = "whole" if case.plans[0].whole_tiles else "split"
            faults += [f"{kernel.name}, {tiles} tiles: {fault}"] if fault else []
    for chain in chains_of(device)[max(0, first - len(kernels)) : max(0, last - len(kernels))]:
        fault = launch_chain(library, memory, device, chain)
        memory.give_back()
        right += not fault
        faults += [f"{chain.name}: {fault}"] if fault else []
    if first == 0:
        run_helpers(library, memory)
    print("\n".join([*faults, f"{right} launches right, {len(faults)} wrong"]))
    return 1 if faults or not right else 0


if __name__ == "__main__":
    sys.exit(main())
