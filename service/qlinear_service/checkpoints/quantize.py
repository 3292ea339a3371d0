"""Quantizes weights here: round to nearest, or with each group's range chosen by its error.

w ~ s * (q - z) along groups of k. Codes are computed with the scale as it is stored, so that no
element that is not clipped is further off than half a scale.
"""

from typing import NamedTuple

import torch

__all__ = ["Quantized", "quantize"]

_FACTORS = tuple(1.0 - 0.025 * step for step in range(25))
"""Parts of the range that are tried: 1 is all of it, 0.4 clips the outer 60 %."""


class Quantized(NamedTuple):
    """Codes of some output features."""

    codes: torch.Tensor
    """uint8 [k, n]."""
    scales: torch.Tensor
    """[ceil(k / group_size), n], or [1, n]."""
    zeros: torch.Tensor | None
    """uint8, as the scales; None if symmetric."""
    squared_error: float
    """Sum over all elements of (w - s (q - z))^2, weighted if there are weights."""
    squares: float
    """Sum of w^2, weighted alike."""


def quantize(
    weight: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    search: bool = False,
    importance: torch.Tensor | None = None,
) -> Quantized:
    """Return the codes of `weight`.

    Args:
        weight: float32 [n, k], finite.
        bits: 4 or 8.
        group_size: input features that share a scale; -1 for all.
        symmetric: the zero point is the middle of the range.
        scale_dtype: of the stored scales.
        search: try several ranges for each group and keep the one with the least squared error.
        importance: float32 [k]: how much an error at each input feature counts, such as the mean
            square of its activations; None counts all alike.

    Raises:
        ValueError: a scale is beyond what `scale_dtype` holds.
    """
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    blocks = torch.nn.functional.pad(weight, (0, groups * size - k)).view(n, groups, size)
    counts = torch.ones(k, device=weight.device) if importance is None else importance
    counts = torch.nn.functional.pad(counts, (0, groups * size - k)).view(1, groups, size)
    best = _rounded(blocks, 1.0, bits, scale_dtype, symmetric=symmetric)
    error = _errors(blocks, counts, *best)
    for factor in _FACTORS[1:] if search else ():
        tried = _rounded(blocks, factor, bits, scale_dtype, symmetric=symmetric)
        its = _errors(blocks, counts, *tried)
        better = its < error
        error = torch.where(better, its, error)
        best = tuple(  # type: ignore[assignment]
            torch.where(better[..., None] if new.dim() == 3 else better, new, old)
            for new, old in zip(tried, best, strict=True)
        )
    codes, scales, zeros = best
    flat = codes.to(torch.uint8).view(n, groups * size)[:, :k]
    return Quantized(
        codes=flat.T.contiguous(),
        scales=scales.T.contiguous(),
        zeros=None if symmetric else zeros.to(torch.uint8).T.contiguous(),
        squared_error=float(error.double().sum()),
        squares=float((blocks.double().square() * counts).sum()),
    )


def _rounded(
    blocks: torch.Tensor, factor: float, bits: int, scale_dtype: torch.dtype, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [n, groups, size] and zero points [n, groups] in float32, and stored scales."""
    last = 2**bits - 1
    if symmetric:
        middle = 2 ** (bits - 1)
        reach = blocks.abs().amax(dim=2) * factor
        scales = _stored(reach, middle - 1, scale_dtype, beyond=0.5)
        zeros = torch.full_like(reach, middle)
    else:
        low = blocks.amin(dim=2).clamp(max=0) * factor
        high = blocks.amax(dim=2).clamp(min=0) * factor
        # Halves, because the whole range may be beyond float32.
        scales = _stored(high / 2 - low / 2, last / 2, scale_dtype, beyond=0)
        wide = scales.float()
        zeros = torch.where(wide > 0, -low / wide, 0.0).round().clamp(0, last)
    wide = scales.float()[..., None]
    steps = torch.where(wide > 0, blocks / wide, 0.0).round()
    return (steps + zeros[..., None]).clamp(0, last), scales, zeros


def _stored(
    reach: torch.Tensor, steps: float, dtype: torch.dtype, *, beyond: float
) -> torch.Tensor:
    """Return scales in `dtype`, none so small that `reach` is further than `beyond` steps out."""
    scales = (reach / steps).to(dtype)
    short = reach > (steps + beyond) * scales.float()
    # The next larger number: of those that are not negative, the next bits.
    bits = scales.view(torch.int32 if dtype == torch.float32 else torch.int16)
    scales = torch.where(short, (bits + 1).view(dtype), scales)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(f"weights up to {float(reach.max()):g} need scales beyond {dtype}")
    return scales


def _errors(
    blocks: torch.Tensor,
    counts: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
) -> torch.Tensor:
    """Return the squared error of each group, [n, groups]."""
    back = (codes - zeros[..., None]) * scales.float()[..., None]
    return ((back - blocks).square() * counts).sum(dim=2)
