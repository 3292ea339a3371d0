"""Every kernel of the library has a name, is taken by a plan, is right, and has run here.

Named so that it comes last; alone it runs each kernel itself.
"""

import itertools
from collections.abc import Iterable

import torch
from gpu.formats import ARRANGEMENTS, kernels_of
from gpu.loading import HIT, RecordingKernels
from gpu.problems import Form, Problem
from gpu.running import Call, check

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import Status
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear


def test_every_kernel_has_a_name_of_its_own(kernels: RecordingKernels) -> None:
    count = kernels.library.ql_cuda_kernel_count()
    names = [kernels.library.ql_cuda_kernel_name(number).decode() for number in range(count)]
    assert len(set(names)) == count >= 32
    for number in (-1, count, 2**31 - 1):
        assert kernels.library.ql_cuda_kernel_name(number).decode() not in names


def test_the_library_has_code_for_this_gpu(kernels: RecordingKernels) -> None:
    listed = kernels.library.ql_cuda_architectures().decode().split()
    assert f"{kernels.info.major}{kernels.info.minor}" in [name.rstrip("a") for name in listed]
    assert kernels.info.supported == 1
    assert kernels.info.name.decode() == torch.cuda.get_device_name(kernels.device)
    properties = torch.cuda.get_device_properties(kernels.device)
    assert kernels.info.sm_count == properties.multi_processor_count
    assert kernels.info.memory_bytes == properties.total_memory


def test_path_rows_take_every_kernel_of_their_format(kernels: RecordingKernels) -> None:
    for bits in (4, 8):
        rows = kernels.path_rows(bits)
        problem = Problem(kernels.device, 4096, 4096, Form(bits=bits))
        x = problem.x(max(rows))

        def taken(rows: Iterable[int], layer: QuantizedLinear = problem.layer) -> set[int]:
            return {kernels.plan(layer, m, DType.F16, DType.F16).kernel for m in rows}

        assert taken(rows) == taken(range(1, 1100))
        exact = problem.product(x)
        for m in rows:
            check(kernels, problem, x[:m], exact[:m], torch.float16)


def test_every_kernel_is_right_and_ran(kernels: RecordingKernels) -> None:
    every = kernels_of(kernels.library)
    for kernel in every:
        if not kernel.runs_on(kernels.info):
            continue
        form = Form(
            bits=kernel.bits, group_size=kernel.group_size, symmetric=False,
            scale_dtype=kernel.dtype if kernel.rounds else DType.F16,
        )  # fmt: skip
        y_dtype = to_torch(kernel.dtype) if kernel.rounds else torch.float32
        problem = Problem(kernels.device, 200, 1024, form)
        rows, ran = 8 * kernel.token_blocks, 0
        cuts = ((rows + 3, 1, 2), (rows, 0, 5))
        for warps, (m, whole, ctas) in itertools.product(ARRANGEMENTS, cuts):
            x = problem.x(m, to_torch(kernel.dtype))
            plan = kernel.plan(warps=warps, stages=2, ctas=ctas, whole_tiles=whole)
            call = Call(kernels, problem, x, y_dtype, plan=plan)
            if call.run() != Status.BAD_PLAN:
                call.check(problem.product(x))
                ran += 1
        assert ran >= 2, kernel.name
        HIT.add(kernel.number)
    missing = [k.name for k in every if k.number not in HIT and k.runs_on(kernels.info)]
    assert not missing, f"{len(missing)} of {len(every)} kernels never ran: {missing}"
