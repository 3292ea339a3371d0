"""Layers of every size: models' own, shards of them, tiny ones, and one beyond 32-bit offsets."""

import itertools

import pytest
import torch
from gpu.loading import RecordingKernels, memory_of_its_own
from gpu.problems import FEW_FORMS, FORMS, Form, Problem, assert_same
from gpu.running import check, rounded

from qlinear_service.dtypes import DType

AWKWARD = (
    10944, 7392, 14784, 18944, 3696, 1408, 576, 2112, 464, 232, 1856, 2688, 10304, 3712, 32, 1, 7,
)  # fmt: skip
"""Sizes that public reports name: of experts, of shards, of fused projections."""

MODELS = [  # (k, n)
    (4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096),  # Llama-2-7B
    (4096, 6144), (4096, 28672), (14336, 4096),  # Llama-3-8B, Mistral-7B
    (5120, 15360), (5120, 5120), (5120, 27648), (13824, 5120),  # Llama-2-13B
    (8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192),  # Llama-70B
    (3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584),  # Qwen2.5-7B
    (5120, 7168), (5120, 55296), (27648, 5120),  # Qwen2.5-32B
    (8192, 59136), (29568, 8192),  # Qwen2.5-72B
    (2048, 3072), (2048, 576), (2048, 21888), (10944, 2048), (2048, 2816), (1408, 2048),
    (7168, 2112), (1536, 24576), (512, 32768), (16384, 7168), (768, 2048),  # DeepSeek, experts
]  # fmt: skip


def check_rows(kernels: RecordingKernels, problem: Problem, rows: tuple[int, ...]) -> None:
    x = problem.x(max(rows))
    exact = problem.product(x)
    for m in rows:
        check(kernels, problem, x[:m], exact[:m])


@pytest.mark.parametrize("size", AWKWARD)
def test_awkward_sizes(kernels: RecordingKernels, size: int) -> None:
    for form in FEW_FORMS:
        check_rows(kernels, Problem(kernels.device, 200, size, form), (1, 5, 16, 40, 70))
        check_rows(kernels, Problem(kernels.device, size, 264, form), (1, 5, 16, 40, 70))


@pytest.mark.parametrize(
    "shape", [(7392, 8192), (3696, 7392), (10304, 3712), (2688, 1856)], ids=str
)
def test_awkward_pairs(kernels: RecordingKernels, shape: tuple[int, int]) -> None:
    k, n = shape
    for form in FEW_FORMS:
        check_rows(kernels, Problem(kernels.device, n, k, form), (1, 19, 100))


@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_layers_of_models(kernels: RecordingKernels, shape: tuple[int, int]) -> None:
    k, n = shape
    with memory_of_its_own():
        check_rows(kernels, Problem(kernels.device, n, k), (1, 8, 16, 33, 64, 130))


@pytest.mark.parametrize("shape", [(4096, 6144), (2048, 576), (3584, 4608)], ids=str)
def test_thousands_of_rows(kernels: RecordingKernels, shape: tuple[int, int]) -> None:
    k, n = shape
    for form in (Form(), Form(bits=8, group_size=32, symmetric=False)):
        check_rows(kernels, Problem(kernels.device, n, k, form), (257, 1000, 1024, 4096))


def test_few_steps_of_k_and_remainders_of_the_ring(kernels: RecordingKernels) -> None:
    """Fewer steps than stages, and every remainder of steps by stages and by warps."""
    sizes = (64, 128, 192, *(3 * 64 + 64 * 4 * 2 + 64 * i for i in range(9)), 1280, 2048, 2432)
    for k, form in itertools.product(sizes, FEW_FORMS):
        check_rows(kernels, Problem(kernels.device, 136, k, form), (1, 11, 30, 64, 90))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_k_up_to_two_groups(kernels: RecordingKernels, form: Form) -> None:
    for k in range(1, 261):
        problem = Problem(kernels.device, 65, k, form)
        x = problem.x(9)
        check(kernels, problem, x, problem.product(x))


def test_every_n_up_to_two_tiles(kernels: RecordingKernels) -> None:
    for n in (*range(1, 131), *range(250, 264), *range(510, 516)):
        form = FEW_FORMS[n % len(FEW_FORMS)]
        check_rows(kernels, Problem(kernels.device, n, 392, form), (1, 9, 66))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_group_size_with_every_kind_of_end(kernels: RecordingKernels, form: Form) -> None:
    """Whole groups, a last group that is cut, and last steps that no real group reaches."""
    for k in (32, 96, 160, 224, 288, 352, 1000, 1056, 1184, 4000):
        check_rows(kernels, Problem(kernels.device, 100, k, form), (1, 10, 33, 65))


def test_parts_of_a_layer(kernels: RecordingKernels) -> None:
    """Features from the middle of a layer on, as start-up tests compute them."""
    problem = Problem(kernels.device, 1000, 520, Form(symmetric=False, bias=torch.float16))
    x = problem.x(6)
    exact = problem.product(x)
    for begin, end in ((0, 64), (64, 1000), (448, 512), (960, 1000)):
        y = kernels.linear(problem.layer.features(begin, end), x, DType.F32)
        assert_same(y, rounded(exact[:, begin:end], torch.float32))


def test_the_longest_k_of_any_model_with_the_smallest_groups(kernels: RecordingKernels) -> None:
    """k = 74240 in groups of 32: more groups than any 11-bit counter holds."""
    with memory_of_its_own():
        form = Form(group_size=32, symmetric=False, scale_dtype=DType.F32)
        check_rows(kernels, Problem(kernels.device, 14848, 74240, form), (1, 20))
