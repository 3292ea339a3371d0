"""Which input features share a scale, and how they are brought into the runtime's groups.

The runtime knows groups of 32, 64 and 128 consecutive features and one group for the whole column.
Any other arrangement that can be cut into such blocks is: features are sorted by group (act-order),
and larger groups become several with the same scale. Nothing is rounded.
"""

from typing import NamedTuple

import torch

from qlinear_service.kernels import layout

__all__ = ["Grouping", "by_index", "check_groups", "sequential"]

_BLOCKS = (128, 64, 32)


class Grouping(NamedTuple):
    """How a layer's features are arranged at run time."""

    size: int
    """Features of a runtime group: 32, 64, 128, or -1 for all."""
    order: torch.Tensor | None = None
    """int64 [k]: runtime feature i is the checkpoint's feature order[i]; None: the same."""
    stored: torch.Tensor | None = None
    """int64 [runtime groups]: which of the checkpoint's groups each one is; None: the same."""


def sequential(k: int, group_size: int) -> Grouping:
    """Return the arrangement of groups of `group_size` consecutive features, the last one shorter.

    Args:
        k: features.
        group_size: -1 or more than 0; at least k is one group.

    Raises:
        ValueError: no runtime group divides the group size.
    """
    if group_size in _BLOCKS:
        return Grouping(group_size)
    if group_size == -1 or group_size >= k:
        return Grouping(-1)
    size = next((block for block in _BLOCKS if group_size % block == 0), None)
    if size is None:
        raise ValueError(
            f"group_size is {group_size}; expected a multiple of 32, or one group for all of "
            f"k = {k}: quantize with one of these"
        )
    return Grouping(size, stored=torch.arange(0, k, size) // group_size)


def check_groups(group_of: torch.Tensor, stored: int, name: str) -> None:
    """Compare the groups of features with the number that there are scales for.

    Args:
        group_of: int [k], the group of each feature.
        stored: number of groups.
        name: of the list, for the error.

    Raises:
        ValueError: one is not among them.
    """
    outside = ((group_of < 0) | (group_of >= stored)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise ValueError(
            f"{name}[{place}] = {int(group_of[place])}; expected a group in 0 .. {stored - 1}"
        )


def by_index(group_of: torch.Tensor, group_size: int, stored: int) -> Grouping:
    """Return the arrangement of features whose groups are listed one by one.

    Args:
        group_of: int [k], the group of each feature, below `stored`.
        group_size: what the configuration says; preferred where it fits.
        stored: number of groups that there are scales for; some may have no feature.

    Raises:
        ValueError: sorted by group, the features cannot be cut into blocks of 32 of one group.
    """
    k = len(group_of)
    groups = group_of.long()
    if bool((groups == groups[0]).all()):
        size = group_size if group_size in _BLOCKS and group_size >= k else -1
        return Grouping(size, None, None if stored == 1 else groups[:1].clone())
    order = torch.argsort(groups, stable=True)
    ordered = groups[order]
    permuted = None if bool((order == torch.arange(k)).all()) else order
    preferred = (group_size,) if group_size in layout.GROUP_SIZES and group_size > 0 else ()
    for size in (*preferred, *_BLOCKS):
        firsts = ordered[::size]
        if bool((firsts.repeat_interleave(size)[:k] == ordered).all()):
            same = torch.equal(firsts, torch.arange(stored))
            return Grouping(size, permuted, None if same else firsts.clone())
    counts = torch.bincount(groups)
    number = int((counts % 32 != 0).nonzero()[0])
    raise ValueError(
        f"group {number} has {int(counts[number])} input features; expected multiples of 32 in "
        "all groups but the last one: quantize with a group_size of 32, 64 or 128"
    )
