"""Python mirror of csrc/layout.h: the same names, numbers and formulas, no more.

csrc/layout.h explains the layout; a test compares every function with the compiled header.
"""

from typing import NamedTuple

__all__ = [
    "ALIGN_BYTES",
    "BITS",
    "GROUP_SIZES",
    "PAD_K",
    "PAD_N",
    "TILE_K",
    "TILE_N",
    "VERSION",
    "CodePlace",
    "code_place",
    "group_count",
    "qweight_bytes",
    "round_up",
    "scale_index",
    "tile_bytes",
]

VERSION = 1
TILE_N = 16
TILE_K = 64
PAD_N = 64
PAD_K = 128
WARP_LANES = 32
VECTOR_BYTES = 16
ALIGN_BYTES = 64
BITS = (4, 8)
GROUP_SIZES = (-1, 32, 64, 128)


class CodePlace(NamedTuple):
    """Byte offset in qweight and the shift of the code's lowest bit inside that byte."""

    byte: int
    shift: int


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return (value + multiple - 1) // multiple * multiple


def tile_bytes(bits: int) -> int:
    """Return the bytes of one 16 x 64 tile."""
    return TILE_N * TILE_K * bits // 8


def qweight_bytes(n_padded: int, k_padded: int, bits: int) -> int:
    """Return the bytes of a padded weight."""
    return n_padded * k_padded * bits // 8


def group_count(k_padded: int, group_size: int) -> int:
    """Return the number of scale groups along k; -1 is one group for the whole column."""
    return 1 if group_size == -1 else k_padded // group_size


def code_place(n: int, k: int, k_padded: int, bits: int) -> CodePlace:
    """Return where the code of (n, k) lies."""
    tile = (n // TILE_N) * (k_padded // TILE_K) + k // TILE_K
    lane = 4 * (n % 8) + (k % 8) // 2
    n_half, k_half, k_odd = n % 16 // 8, k % 16 // 8, k % 2
    block = k % TILE_K // 16
    if bits == 4:
        slot = n_half + 2 * k_half + 4 * k_odd
        byte = lane * VECTOR_BYTES + 4 * block + slot // 2
        return CodePlace(tile * tile_bytes(4) + byte, slot % 2 * 4)
    vector, word = block // 2, 2 * (block % 2) + k_half
    byte = (vector * WARP_LANES + lane) * VECTOR_BYTES + 4 * word + n_half + 2 * k_odd
    return CodePlace(tile * tile_bytes(8) + byte, 0)


def scale_index(group: int, n: int, groups: int) -> int:
    """Return where the scale (or zero point) of (group, n) lies, in elements."""
    return ((n // TILE_N) * groups + group) * TILE_N + 2 * (n % 8) + n % 16 // 8
