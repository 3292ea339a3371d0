"""How far a kernel may be from the exact result, from k and dtypes alone.

Products of a 16-bit x and a code minus its zero point are exact in float32. A tensor core adds
sixteen of them to a running sum: it shifts all addends to the largest one's exponent and cuts what
hangs over, on the GPUs from sm_80 on at 2^-24 to 2^-25 of the largest. Seventeen cuts of half that
on average make 2^-22 of the largest addend for each step of 16 k. The largest addend is the running
sum; of products that are independent and as often negative as positive it is seldom beyond four
times the root of the sum of their squares, the *norm*. Cutting always goes towards zero, so losses
add up instead of evening out: k / 16 steps lose at most k / 16 * 2^-22 * 4 norms. Group sums and
shares of a tile are added in float32, rounded to nearest: a step each. Then y is rounded once.

Kernels that multiply codes *raw* (csrc/cuda/raw.cuh) lose more. In float16 a raw code is a
subnormal number, which tensor cores line up like 2^-14, 1024 times its unit: seventeen cuts of half
of 2^-24 of that lose 2^-11 of the row's largest x times the scale for each step, as 2^9 more of a
norm would. In bfloat16 it is up to 143 where a code minus its zero point is up to 15.

Kernels that *round* weights to 16 bits (csrc/cuda/warpgroup.cuh) are off by up to half a unit of
each weight, independently: 0.58 half units times the norm is the deviation of the sum, and four
times half a unit is seven deviations.
"""

import torch
from gpu.loading import RecordingKernels
from gpu.problems import Problem

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaPlan
from qlinear_service.kernels.torch_types import from_torch

HALF_UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
MEAN = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 4e-5}
"""Of mean |error| / mean |y|: what public tests of such kernels ask of float16, and the same
relation to the rounding of y for the others."""

SHARES = 64
"""Shares of a tile that are added one after the other, at most, with warps counted in."""


def norms(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each element's products, float64 [m, n]."""
    squares = x.double().square()
    parts = [squares @ problem.weights(b, e).square().T for b, e in problem.slabs()]
    return torch.cat(parts, dim=1).sqrt()


def raw_norms(
    kernels: RecordingKernels, problem: Problem, x: torch.Tensor, y_dtype: torch.dtype
) -> torch.Tensor:
    """Return what is to be added to the norms where the planner takes a kernel with raw codes."""
    plan = kernels.plan(problem.layer, len(x), from_torch(x.dtype), from_torch(y_dtype))
    if not plan.copy_warp or plan.token_blocks > 2 or _rounds(plan, problem):
        return torch.zeros((1, 1), dtype=torch.float64, device=x.device)
    return norms_of_raw_codes(problem, x)


def norms_of_raw_codes(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """Return what is to be added to the norms where codes are multiplied raw."""
    scales = problem.logical.scales.double().abs().amax(dim=0)
    if x.dtype == torch.float16:
        return 2.0**9 * x.double().abs().amax(dim=1, keepdim=True) * scales
    if problem.form.bits == 8:  # not raw: bfloat16 has no room for such codes
        return torch.zeros((1, 1), dtype=torch.float64, device=x.device)
    return 143 * x.double().norm(dim=1, keepdim=True) * scales


def rounds_weights(kernels: RecordingKernels, problem: Problem, m: int, x: DType, y: DType) -> bool:
    """Return whether the planner takes a kernel that rounds weights."""
    plan = kernels.plan(problem.layer, m, x, y)
    return _rounds(plan, problem)


def _rounds(plan: CudaPlan, problem: Problem) -> bool:
    coarse = problem.form.group_size in (-1, 128)
    return bool(plan.copy_warp) and (plan.token_blocks >= 16 or not coarse)


def assert_near(
    kernels: RecordingKernels,
    problem: Problem,
    x: torch.Tensor,
    y: torch.Tensor,
    exact: torch.Tensor,
    norm: torch.Tensor,
    *,
    name: str = "",
    planned: bool = True,
) -> None:
    """Compare every element with its bound, and the mean with what it should be.

    Args:
        kernels: what computed.
        problem: the layer.
        x: what was multiplied.
        y: what a kernel gave.
        exact: what is right, float64.
        norm: what `norms` says of these rows.
        name: for the message.
        planned: by the kernel that the planner takes; else by that of chains, with raw codes.
    """
    spec = problem.logical.spec
    more = raw_norms(kernels, problem, x, y.dtype) if planned else norms_of_raw_codes(problem, x)
    norm = norm + more
    if problem.logical.bias is not None:
        norm = norm + problem.logical.bias.double().abs() / 4
    steps = spec.k_padded / 16 + spec.groups + SHARES
    # 2^-25: half a unit of subnormal float16 numbers.
    bound = steps * 2.0**-22 * 4 * norm + HALF_UNIT[y.dtype] * exact.abs() + 2.0**-25
    x_dtype, y_dtype = from_torch(x.dtype), from_torch(y.dtype)
    if planned and rounds_weights(kernels, problem, len(x), x_dtype, y_dtype):
        bound = bound + 4 * HALF_UNIT[x.dtype] * norm
    error = (y.double() - exact).abs()
    worst = (error / bound).max().item()
    mean = (error.mean() / exact.abs().mean()).item()
    text = f"{name} m={len(y)} {spec.shape} {problem.form} {y.dtype}"
    assert worst <= 1.0, f"{text}: {worst:.2f} times the bound"
    assert mean <= MEAN[y.dtype], f"{text}: mean error {mean:.2e} of the mean"
