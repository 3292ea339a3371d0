"""The torch operations on the GPU: accepted by torch, compiled, and captured in graphs."""

from collections.abc import Iterator

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import FEW_FORMS, Form, Problem, assert_same
from gpu.running import rounded

from qlinear_service.dtypes import DType
from qlinear_service.kernels import torch_ops
from qlinear_service.kernels.torch_ops import QuantizedLinearModule


@pytest.fixture(autouse=True)
def _kernels(kernels: RecordingKernels) -> Iterator[None]:
    torch_ops.use_kernels(kernels)
    yield
    torch_ops._kernels.clear()


@pytest.mark.parametrize("form", [*FEW_FORMS, Form(permuted=True)], ids=str)
def test_the_module_is_right(kernels: RecordingKernels, form: Form) -> None:
    problem = Problem(kernels.device, 200, 520, form)
    module = QuantizedLinearModule(problem.layer, output_dtype=DType.F32)
    x = problem.x(12)
    expected = rounded(problem.product(x), torch.float32)
    assert_same(module(x.view(3, 4, 520)).view(12, 200), expected)
    assert_same(module(x.T.contiguous().T), expected)


def test_torch_accepts_the_operations(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 70, 200, Form(symmetric=False, bias=torch.float16))
    layer = problem.layer
    given = (problem.x(5), layer.qweight, layer.scales, layer.zeros, layer.bias, 70, 200, 4, 128,
             torch.float32)  # fmt: skip
    torch.library.opcheck(torch_ops.linear, given)
    order = torch.randperm(200, device=kernels.device).int()
    torch.library.opcheck(torch_ops.gather, (problem.x(5), order))


def test_a_model_moves_to_the_gpu_whole(kernels: RecordingKernels) -> None:
    problem = Problem(torch.device("cpu"), 96, 200, Form(symmetric=False, bias=torch.bfloat16))
    module = QuantizedLinearModule(problem.layer).to(kernels.device).half()
    x = problem.x(7)
    assert_same(module(x.to(kernels.device)).cpu(), rounded(problem.product(x), torch.float16))


def test_a_compiled_model_gives_the_same_bits(kernels: RecordingKernels) -> None:
    problems = [Problem(kernels.device, 520, 256, exact=False),
                Problem(kernels.device, 96, 520, Form(permuted=True), exact=False)]  # fmt: skip
    model = torch.nn.Sequential(
        QuantizedLinearModule(problems[0].layer), torch.nn.ReLU(),
        QuantizedLinearModule(problems[1].layer),
    )  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (1, 8, 33):
        x = problems[0].normal_x(rows)
        assert torch.equal(compiled(x), model(x))


def test_operations_in_a_graph(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 520, 4096)
    module = QuantizedLinearModule(problem.layer, output_dtype=DType.F32)
    x = problem.x(6)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    for _ in range(20):
        x.copy_(problem.x(6))
        graph.replay()
        assert_same(y, rounded(problem.product(x), torch.float32))
