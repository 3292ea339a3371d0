"""The CPU kernels against the torch reference: every feature, every element."""

import itertools
import subprocess

import pytest
import torch
from closeness import assert_close, kernels_are
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, layout, packing, reference
from qlinear_service.kernels.backends import CpuBody, CpuKernels, TorchKernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LogicalLayer

LIBRARY = build.build_cpu_library(build.default_cache_dir())


def has_body(body: CpuBody) -> bool:
    """Ask the library itself: a bad body is a status of its own."""
    kernels = CpuKernels(LIBRARY, threads=1, body=body)
    try:
        kernels.linear(packing.pack(random_layer(n=1, k=1)), torch.ones(1, 1).half(), DType.F16)
    except RuntimeError as error:
        if "cannot run that body" not in str(error):
            raise
        return False
    return True


@pytest.fixture(
    scope="module",
    params=[CpuBody.PLAIN, CpuBody.AVX2, CpuBody.AVX512, CpuBody.AVX512_BF16],
    ids=lambda body: body.name,
)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    if not has_body(request.param):
        pytest.skip(f"this processor has no {request.param.name}")
    # The body itself at every m; slabs have tests of their own.
    return CpuKernels(LIBRARY, threads=2, body=request.param, slab_rows={})


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize("group_size", layout.GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_format_and_dtype(
    kernels: CpuKernels, bits: int, group_size: int, symmetric: bool
) -> None:
    for scale_dtype, x_dtype, y_dtype in itertools.product(DType, DType, DType):
        layer = random_layer(
            n=100,
            k=200,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            scale_dtype=scale_dtype,
            bias=x_dtype is not DType.BF16,
            permuted=not symmetric,
        )
        x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)).to(to_torch(x_dtype))
        assert_close(kernels, layer, x, y_dtype)


@pytest.mark.parametrize("group_size", layout.GROUP_SIZES)
def test_long_rows_cross_every_chunk(kernels: CpuKernels, group_size: int) -> None:
    """k beyond one chunk of 1024, and a last chunk that is not full; both forms of zero points."""
    for symmetric in (True, False):
        layer = random_layer(n=33, k=2500, group_size=group_size, symmetric=symmetric)
        for m in (1, 9):
            x = torch.randn(m, 2500, generator=torch.Generator().manual_seed(2)).half()
            assert_close(kernels, layer, x, DType.F32)


# One column or input; one less and more than a tile, a padded size, a row chunk; a prime pair.
SHAPES = [
    *((1, n, 128) for n in (1, 15, 16, 17, 63, 64, 65)),
    *((2, 64, k) for k in (1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129)),
    *((m, 97, 131) for m in (1, 2, 31, 32, 33, 64, 65, 100)),
]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_awkward_shapes(kernels: CpuKernels, m: int, n: int, k: int) -> None:
    for group_size in (-1, 32, 128):
        layer = random_layer(n=n, k=k, group_size=group_size, bias=True, symmetric=False)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).half()
        assert_close(kernels, layer, x, DType.F16)


@pytest.mark.parametrize("bits", layout.BITS)
def test_one_hot_rows_decode_every_weight_exactly(kernels: CpuKernels, bits: int) -> None:
    if kernels_are(kernels, CpuBody.AVX512_BF16) and bits != 4:
        pytest.skip("this body is for 4 bits")
    layer = random_layer(n=80, k=192, bits=bits, group_size=32, symmetric=False)
    y = kernels.linear(packing.pack(layer), torch.eye(192).half(), DType.F32)
    assert torch.equal(y, reference.dequantize(layer).T)


def identity() -> LogicalLayer:
    """A layer of one weight that is exactly one."""
    layer = random_layer(n=1, k=1, scale_dtype=DType.F32, group_size=-1)
    layer.codes.fill_(9)
    layer.scales.fill_(1.0)
    return layer


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_16_bit_pattern_widens_exactly(kernels: CpuKernels, dtype: DType) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(to_torch(dtype))[:, None]
    y = kernels.linear(packing.pack(identity()), x, DType.F32)
    assert torch.equal(y.isnan(), x.isnan())
    expected = x.float()
    # The bfloat16 instruction takes values below 2^-126 for zero; its header file says so.
    if kernels.body is CpuBody.AVX512_BF16:
        expected[expected.abs() < 2**-126] = 0
    assert torch.equal(y[~x.isnan()], expected[~x.isnan()])


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_narrowing_rounds_as_torch_does(kernels: CpuKernels, dtype: DType) -> None:
    """Sums that lie on, above and below the middle of two neighbours, even and odd, of every size.

    Three bfloat16 inputs add up exactly: any value, a last place of the output, half of one.
    """
    layer = random_layer(n=1, k=3, scale_dtype=DType.F32, group_size=-1)
    layer.codes.fill_(9)
    layer.scales.fill_(1.0)
    high = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    # Far enough from bfloat16's subnormals that the smallest addend is none either.
    high = high[(high.abs() > 2**-100) | (high == 0) | high.isnan()]
    exponent = torch.frexp(high.float().abs().nan_to_num(0, 0)).exponent - 1
    leading = torch.ldexp(torch.ones(len(high)), exponent) * high.float().sign().nan_to_num(0)
    for odd, half in itertools.product((0, 2**-10), (0, 2**-8, 3 * 2**-9, 2**-11, 3 * 2**-12)):
        x = torch.stack((high, (leading * odd).bfloat16(), (leading * half).bfloat16()), dim=1)
        exact = x.float().sum(dim=1, keepdim=True)
        y = kernels.linear(packing.pack(layer), x, dtype)
        expected = exact.to(to_torch(dtype))
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y[~y.isnan()], expected[~y.isnan()])


def test_float32_x_is_rounded_to_the_compute_dtype(kernels: CpuKernels) -> None:
    x = torch.tensor([[1.0 + 2**-12]])
    for scale_dtype, expected in ((DType.F16, 1.0), (DType.BF16, 1.0)):
        layer = random_layer(n=1, k=1, scale_dtype=scale_dtype, group_size=-1)
        layer.codes.fill_(9)
        layer.scales.fill_(1.0)
        assert kernels.linear(packing.pack(layer), x, DType.F32).item() == expected
    layer = random_layer(n=1, k=1, scale_dtype=DType.F16, group_size=-1)
    layer.codes.fill_(9)
    layer.scales.fill_(1.0)
    assert kernels.linear(packing.pack(layer), x + 2**-10, DType.F32).item() == 1 + 2**-10


def test_nan_and_inf_stay_in_their_row(kernels: CpuKernels) -> None:
    layer = packing.pack(random_layer(n=65, k=130, bias=True))
    x = torch.randn(6, 130).half()
    clean = kernels.linear(layer, x, DType.F32)
    x[1, 3], x[4, 129] = float("nan"), float("inf")
    y = kernels.linear(layer, x, DType.F32)
    assert y[1].isnan().all()
    assert not y[4].isfinite().any()
    assert torch.equal(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_a_row_does_not_depend_on_its_company(kernels: CpuKernels) -> None:
    layer = packing.pack(random_layer(n=128, k=512))
    x = torch.randn(70, 512).bfloat16()
    together = kernels.linear(layer, x, DType.F32)
    for row in (0, 31, 32, 69):
        assert torch.equal(kernels.linear(layer, x[row : row + 1], DType.F32)[0], together[row])


def test_strided_rows(kernels: CpuKernels) -> None:
    layer = packing.pack(random_layer(n=64, k=128))
    wide = torch.randn(9, 200).half()
    y = kernels.linear(layer, wide[::2, 5:133], DType.F16)
    assert torch.equal(y, kernels.linear(layer, wide[::2, 5:133].contiguous(), DType.F16))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear(layer, torch.randn(128, 4).half().T, DType.F16)


@pytest.mark.parametrize("permuted", [False, True])
def test_rows_of_an_expanded_tensor(kernels: CpuKernels, permuted: bool) -> None:
    layer = packing.pack(random_layer(n=64, k=128, group_size=32, permuted=permuted))
    row = torch.randn(1, 128).half()
    for rows in (2, 5, 300):
        y = kernels.linear(layer, row.expand(rows, -1), DType.F16)
        assert torch.equal(y, kernels.linear(layer, row.repeat(rows, 1), DType.F16))
    permutation = torch.randperm(128).int()
    gathered = kernels.gather(row.expand(7, -1), permutation)
    assert torch.equal(gathered, row[:, permutation.long()].expand(7, -1))


def test_no_rows(kernels: CpuKernels) -> None:
    y = kernels.linear(packing.pack(random_layer(n=7, k=9)), torch.empty(0, 9).half(), DType.F16)
    assert y.shape == (0, 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gather_is_indexing(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x = torch.randn(20, 77).to(dtype)[::2]
    permutation = torch.randperm(77).int()
    assert torch.equal(kernels.gather(x, permutation), x[:, permutation.long()])


def test_best_is_the_fastest_body_that_runs_here() -> None:
    best = CpuKernels(LIBRARY, threads=1)
    for bits in layout.BITS:
        layer, x = packing.pack(random_layer(n=64, k=256, bits=bits)), torch.randn(3, 256).half()
        y = best.linear(layer, x, DType.F32)
        bodies = [b for b in CpuBody if b is not CpuBody.BEST and has_body(b)]
        fastest = [b for b in bodies if bits == 4 or b is not CpuBody.AVX512_BF16][-1]
        path = LIBRARY
        assert torch.equal(y, CpuKernels(path, threads=1, body=fastest).linear(layer, x, DType.F32))
        assert f"{fastest.name} for {bits} bits" in best.description


def test_the_torch_path_answers_too() -> None:
    layer = random_layer(n=30, k=70, bias=True, permuted=True)
    assert_close(TorchKernels(), layer, torch.randn(4, 70).half(), DType.F16)


def test_each_body_is_bitwise_repeatable(kernels: CpuKernels) -> None:
    layer = packing.pack(random_layer(n=256, k=1024, bias=True))
    x = torch.randn(13, 1024).half()
    first = kernels.linear(layer, x, DType.F32)
    assert all(torch.equal(kernels.linear(layer, x, DType.F32), first) for _ in range(20))


def test_no_inline_function_is_shared_between_instruction_sets() -> None:
    """A weak symbol outside a body's namespace could be merged into code for a newer processor."""
    listed = subprocess.run(
        ["nm", "-C", str(LIBRARY)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    weak = [line.split(maxsplit=2)[2] for line in listed if line[17:18] in "WVu"]
    bodies = ("avx2", "avx512", "avx512_bf16", "dequantize", "plain")
    ours = [name for name in weak if "qlinear::" in name]
    shared = [n for n in ours if not any(f"qlinear::cpu::{body}::" in n for body in bodies)]
    assert ours
    assert not shared
