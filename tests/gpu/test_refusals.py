"""Every bad parameter has its status and its sentence; none has a wrong result or a crash."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.loading import RecordingKernels, library_path, memory_of_its_own
from gpu.problems import Form, Problem
from gpu.running import COUNTER_BYTES, Call, split_plan

from qlinear_service.dtypes import DType
from qlinear_service.errors import BuildError
from qlinear_service.kernels.cuda import CudaKernels, DeviceLost
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaLaunch, Status


@pytest.fixture(scope="module")
def problem(device: torch.device) -> Problem:
    """One that is split between thread blocks, so that it needs a workspace."""
    return Problem(device, 200, 8192, Form(symmetric=False, bias=torch.float16))


@pytest.fixture
def call(kernels: RecordingKernels, problem: Problem) -> Call:
    x = problem.x(3)
    return Call(kernels, problem, x, plan=split_plan(kernels, problem, x))


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("m", -1, Status.BAD_SHAPE), ("n", -1, Status.BAD_SHAPE), ("k", -5, Status.BAD_SHAPE),
        ("x_row_stride", 8191, Status.BAD_SHAPE), ("y_row_stride", 199, Status.BAD_SHAPE),
        ("bits", 3, Status.BAD_BITS), ("bits", 0, Status.BAD_BITS), ("bits", 16, Status.BAD_BITS),
        ("group_size", 48, Status.BAD_GROUP_SIZE), ("group_size", 0, Status.BAD_GROUP_SIZE),
        ("group_size", -2, Status.BAD_GROUP_SIZE), ("group_size", 256, Status.BAD_GROUP_SIZE),
        ("x_dtype", 0, Status.BAD_DTYPE), ("y_dtype", 9, Status.BAD_DTYPE),
        ("scale_dtype", -1, Status.BAD_DTYPE), ("bias_dtype", 4, Status.BAD_DTYPE),
        ("x", None, Status.NULL_POINTER), ("y", None, Status.NULL_POINTER),
        ("qweight", None, Status.NULL_POINTER), ("scales", None, Status.NULL_POINTER),
        ("m", 0, Status.OK), ("threads", 0, Status.OK), ("body", 9, Status.OK),
    ],
)  # fmt: skip
def test_each_bad_parameter_has_its_status(
    kernels: RecordingKernels, call: Call, field: str, value: int | None, status: Status
) -> None:
    assert call.run() == Status.OK
    setattr(call.params, field, value)
    call.plan = None
    call.launch.plan = None
    assert call.run() == status
    assert kernels.library.ql_status_text(status)
    kernels.wait()


def test_float32_x_needs_a_16_bit_compute_dtype(call: Call) -> None:
    call.params.x_dtype, call.params.compute_dtype = DType.F32, DType.F32
    assert call.run() == Status.BAD_DTYPE


@pytest.mark.parametrize("offset", [1, 8, 16, 32, 63])
def test_a_misaligned_qweight_is_refused(call: Call, offset: int) -> None:
    call.params.qweight += offset
    assert call.run() == Status.MISALIGNED


@pytest.mark.parametrize("ordinal", [-1, 64, 1000, 2**31 - 1])
def test_a_device_that_is_not_there(kernels: RecordingKernels, call: Call, ordinal: int) -> None:
    call.launch.device = ordinal
    assert call.run() == Status.NO_DEVICE
    assert str(ordinal) in kernels.library.ql_cuda_error_text().decode()
    with pytest.raises(BuildError, match=f"CUDA device {ordinal} cannot be used"):
        CudaKernels(library_path(), device=ordinal)


def test_null_structs(kernels: RecordingKernels, call: Call) -> None:
    library = kernels.library
    assert library.ql_cuda_linear(None, call.launch) == Status.NULL_POINTER
    assert library.ql_cuda_linear(call.params, None) == Status.NULL_POINTER
    assert library.ql_cuda_gather(None, call.launch) == Status.NULL_POINTER
    assert library.ql_cuda_dequantize(None, 0, 16, 1, None, call.launch) == Status.NULL_POINTER
    assert library.ql_cuda_dequantize(
        call.params, 0, 16, DType.F32, None, call.launch
    ) == Status.NULL_POINTER  # fmt: skip
    assert library.ql_cuda_empty(None) == Status.NULL_POINTER
    assert library.ql_cuda_read_probe(None, 16, 0, None, call.launch) == Status.NULL_POINTER
    assert library.ql_cuda_plan_linear(None, kernels.info, 0, call.plan) == Status.NULL_POINTER
    assert library.ql_cuda_device_info(0, None) == Status.NULL_POINTER


@pytest.mark.parametrize("field", ["sm_count", "shared_bytes_per_block", "major"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_description_that_is_no_gpus(
    kernels: RecordingKernels, call: Call, field: str, value: int
) -> None:
    described = CudaDevice.from_buffer_copy(kernels.info)
    setattr(described, field, value)
    plan_linear = kernels.library.ql_cuda_plan_linear
    assert plan_linear(call.params, described, 0, call.plan) == Status.BAD_DESCRIPTION
    assert b"no GPU" in kernels.library.ql_status_text(Status.BAD_DESCRIPTION)


@pytest.mark.parametrize("fault", ["null", "misaligned", "one byte short"])
def test_a_workspace_that_does_not_do(call: Call, fault: str) -> None:
    call.launch.workspace_bytes = call.needed_bytes()
    assert call.launch.workspace_bytes > COUNTER_BYTES
    assert call.run() == Status.OK
    if fault == "null":
        call.launch.workspace = None
    elif fault == "misaligned":
        call.launch.workspace += 128
    else:
        call.launch.workspace_bytes -= 1
    assert call.run() == Status.WORKSPACE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_blocks", 0), ("token_blocks", 3), ("token_blocks", 32), ("token_blocks", -1),
        ("warps_n", 0), ("warps_n", 3), ("warps_n", 16), ("warps_n", -4),
        ("warps_k", 0), ("warps_k", 17), ("warps_k", -1), ("warps_k", 1000),
        ("stages", 0), ("stages", 1), ("stages", 9), ("stages", -3),
        ("warpgroups", 1),  # of eight rows
        ("ctas", 0), ("ctas", -1), ("ctas", 2**31 - 1),
    ],
)  # fmt: skip
def test_each_bad_field_of_a_plan_is_refused(
    kernels: RecordingKernels, call: Call, field: str, value: int
) -> None:
    assert call.run() == Status.OK
    kernels.wait()
    call.y.fill_(float("nan"))
    setattr(call.plan, field, value)
    assert call.run() == Status.BAD_PLAN
    text = kernels.library.ql_cuda_error_text().decode()
    assert "linear m=3 n=200 k=8192" in text
    assert field in text or "registers" in text
    kernels.wait()
    assert call.y.isnan().all()


def test_a_plan_with_more_blocks_than_whole_tiles(kernels: RecordingKernels, call: Call) -> None:
    assert call.plan is not None
    call.plan.whole_tiles = 1
    call.plan.ctas = call.plan.m_tiles * call.plan.n_tiles + 1
    assert call.run() == Status.BAD_PLAN
    assert "ctas" in kernels.library.ql_cuda_error_text().decode()


def test_a_plan_that_needs_more_shared_memory_than_there_is(
    kernels: RecordingKernels, call: Call
) -> None:
    assert call.plan is not None
    call.plan.warpgroups = call.plan.copy_warp = 0
    call.plan.token_blocks, call.plan.warps_n, call.plan.warps_k = 8, 1, 8
    call.plan.stages = 4
    assert call.run() == Status.BAD_PLAN
    assert "shared memory" in kernels.library.ql_cuda_error_text().decode()


def test_the_wrapper_names_operation_shape_and_reason(
    kernels: RecordingKernels, problem: Problem
) -> None:
    shifted = problem.layer.qweight.flatten()
    room = torch.empty(len(shifted) + 64, dtype=torch.uint8, device=kernels.device)
    moved = room[8 : 8 + len(shifted)].copy_(shifted).view(problem.layer.qweight.shape)
    layer = type(problem.layer)(spec=problem.layer.spec, qweight=moved, scales=problem.layer.scales,
                                zeros=problem.layer.zeros, bias=problem.layer.bias)  # fmt: skip
    text = r"linear m=3 k8192_n200_b4_g128 on cuda:0: .*multiple of 64 bytes \(status 8\)"
    with pytest.raises(RuntimeError, match=text):
        kernels.linear(layer, problem.x(3), DType.F16)
    with pytest.raises(ValueError, match=r"x is .* on cpu; expected .* on cuda:0"):
        kernels.linear(problem.layer, problem.x(3).cpu(), DType.F16)
    on_host = Problem(torch.device("cpu"), 64, 8192).layer
    with pytest.raises(ValueError, match=r"layer .* is on cpu; move it with to_device"):
        kernels.linear(on_host, problem.x(3), DType.F16)


def test_no_memory_fails_that_call_alone(kernels: RecordingKernels) -> None:
    """x of 7 GB would need a y of 3.6 TB."""
    problem = Problem(kernels.device, 32832, 64)
    with memory_of_its_own():
        x = torch.zeros(55_000_000, 64, dtype=torch.float16, device=kernels.device)
        with pytest.raises(RuntimeError, match=r"linear m=55000000 .*out of memory") as caught:
            kernels.linear(problem.layer, x, DType.F16)
        assert not isinstance(caught.value, DeviceLost)
    assert kernels.linear(problem.layer, problem.x(1), DType.F16).isfinite().all()


LOSE = """
import sys
import torch
from gpu.loading import open_kernels
from gpu.problems import Problem
from gpu.running import Call
from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda import DeviceLost

kernels = open_kernels()
problem = Problem(kernels.device, 64, 4096)
call = Call(kernels, problem, problem.x(3))
call.params.qweight = 0x100  # no such address
assert call.run() == 0
try:
    kernels.wait()
except DeviceLost as error:
    print("wait:", error)
try:
    kernels.linear(problem.layer, call.x, DType.F16, out=call.y)
except ValueError:
    pass
try:
    kernels.linear(problem.layer, call.x, DType.F32, out=call.y)
except DeviceLost as error:
    print("linear:", error)
sys.stdout.flush()
import os
os._exit(0)
"""


def test_a_lost_device_is_recognised(kernels: RecordingKernels) -> None:
    """In a process of its own, for nothing on its GPU works afterwards."""
    tests = Path(__file__).parents[1]
    folders = [tests, tests.parent / "service", tests.parent / "proto", tests.parent / "client"]
    program = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}\n{LOSE}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100
    )
    assert "wait: wait on cuda:0: " in done.stdout, done.stderr[-2000:]
    assert "linear: linear m=3 k4096_n64_b4_g128 on cuda:0: " in done.stdout, done.stderr[-2000:]


def test_launches_without_a_struct_for_them(kernels: RecordingKernels) -> None:
    """Bad sizes of the helpers."""
    library, launch = kernels.library, CudaLaunch(device=kernels.device.index or 0)
    memory = torch.zeros(64, dtype=torch.uint8, device=kernels.device)
    address = memory.data_ptr()
    assert library.ql_cuda_read_probe(address, 17, 0, address, launch) == Status.BAD_SHAPE
    assert library.ql_cuda_read_probe(address, -16, 0, address, launch) == Status.BAD_SHAPE
    for variant in (-1, library.ql_cuda_read_variants()):
        status = library.ql_cuda_read_probe(address, 64, variant, address, launch)
        assert status == Status.BAD_PLAN
    problem = Problem(kernels.device, 64, 128)
    params = kernels._params_of(problem.layer)
    out = torch.empty(64, 128, device=kernels.device).data_ptr()
    for begin, count in ((8, 16), (-16, 16), (0, 65), (80, 0), (16, 2**62)):
        status = library.ql_cuda_dequantize(params, begin, count, DType.F32, out, launch)
        assert status == Status.BAD_SHAPE, (begin, count)
    assert library.ql_cuda_dequantize(params, 0, 16, 7, out, launch) == Status.BAD_DTYPE
