"""One packed layout for every kernel: the same packed bytes through few rows, many rows and wgmma.

tests/csrc/wgmma_layout.cu is a program of its own: it knows csrc/layout.h and the PTX manual, not
our kernels, and reads tensors from files as they were packed here.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import FORMS, Form, Problem, assert_same
from gpu.running import check, described

from qlinear_service.dtypes import DType
from qlinear_service.kernels.ninja import ToolMissing
from qlinear_service.kernels.nvcc import find_nvcc, link_folders
from qlinear_service.kernels.torch_types import from_torch

ROOT = Path(__file__).parents[2]
VARIABLE = "QLINEAR_WGMMA_LAYOUT"
"""Names the program where it is built elsewhere."""

ROWS = (8, 64, 130)
"""One block of rows, the most that a tile holds, and several tiles with a ragged end."""

N, K = 200, 648  # neither is a multiple of its padding
SHORT_NAMES = {DType.F16: "f16", DType.BF16: "bf16", DType.F32: "f32"}


def build(folder: Path) -> Path:
    """Compile the program for Hopper, warnings as errors."""
    try:
        nvcc, _ = find_nvcc()
    except ToolMissing as missing:
        pytest.skip(f"{missing}; or name the built program with {VARIABLE}")
    program = folder / "wgmma_layout"
    flags = ["-std=c++17", "-O2", "--expt-relaxed-constexpr", "-Werror", "all-warnings"]
    flags += ["-gencode=arch=compute_90a,code=sm_90a", f"-I{ROOT / 'csrc'}"]
    flags += [f"-L{path}" for path in link_folders(nvcc)]
    source = ROOT / "tests" / "csrc" / "wgmma_layout.cu"
    subprocess.run([nvcc, *flags, str(source), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def program(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("wgmma is of compute capability 9.0 alone")
    named = os.environ.get(VARIABLE)
    return Path(named) if named else build(tmp_path_factory.mktemp("wgmma"))


def run(program: Path, device: torch.device, *words: str | Path) -> str:
    """Run the program on the GPU of these tests and return what it printed."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    visible = shown.split(",")[index] if shown else str(index)
    done = subprocess.run(
        [program, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def write_problem(folder: Path, problem: Problem, x: torch.Tensor, exact: torch.Tensor) -> None:
    """Write what the program reads: the packed tensors, byte for byte, x and the right y."""
    layer, spec = problem.layer, problem.logical.spec
    meta = {
        "m": len(x), "n": spec.n, "k": spec.k, "bits": spec.bits, "group_size": spec.group_size,
        "zeros": int(layer.zeros is not None), "exact": 1, "x": SHORT_NAMES[from_torch(x.dtype)],
        "scales": SHORT_NAMES[spec.scale_dtype], "y": "f64",
    }  # fmt: skip
    folder.mkdir()
    (folder / "meta.txt").write_text("".join(f"{name} {value}\n" for name, value in meta.items()))
    tensors = {"x": x, "qweight": layer.qweight, "scales": layer.scales, "y": exact.double()}
    if layer.zeros is not None:
        tensors["zeros"] = layer.zeros
    for name, tensor in tensors.items():
        (folder / f"{name}.bin").write_bytes(raw_bytes(tensor))


def form_of(form: Form, scale_dtype: DType) -> Form:
    return Form(
        bits=form.bits, group_size=form.group_size, symmetric=form.symmetric,
        scale_dtype=scale_dtype,
    )  # fmt: skip


def test_wgmma_reads_what_the_layout_says(program: Path, device: torch.device) -> None:
    printed = run(program, device)
    assert printed.count("\nok ") + printed.startswith("ok ") == 96
    assert printed.splitlines()[-1] == "ok"


def test_descriptors_are_read_as_the_manual_says(program: Path, device: torch.device) -> None:
    assert run(program, device, "--descriptor-variants").splitlines()[-1] == "ok"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_kernel_reads_the_same_packed_bytes(
    program: Path, kernels: RecordingKernels, form: Form, dtype: torch.dtype, tmp_path: Path
) -> None:
    for scale_dtype in DType:
        problem = Problem(kernels.device, N, K, form_of(form, scale_dtype))
        ran = set()
        folders = []
        for m in ROWS:
            x = problem.x(m, dtype)
            exact = problem.product(x)
            check(kernels, problem, x, exact)
            plan = kernels.plan(problem.layer, m, from_torch(dtype), DType.F32)
            ran.add(kernels.library.ql_cuda_kernel_name(plan.kernel))
            assert plan.m_tiles * plan.token_blocks * 8 >= m, described(plan)
            folders.append(tmp_path / f"{SHORT_NAMES[scale_dtype]}_{m}")
            write_problem(folders[-1], problem, x, exact)
        assert len(ran) > 1, f"few rows and many ran the same kernel: {ran}"
        run(program, kernels.device, *folders)
        for folder, m in zip(folders, ROWS, strict=True):
            y = torch.frombuffer(bytearray((folder / "out.bin").read_bytes()), dtype=torch.float32)
            expected = torch.frombuffer(
                bytearray((folder / "y.bin").read_bytes()), dtype=torch.float64
            )
            assert_same(y.view(m, N), expected.float().view(m, N))
