"""Unpacks 32-bit words into the codes that lie in them, lowest bits first.

Bytes of a word come lowest first (files and every supported machine are little-endian). Bytes have
no sign bit to drag in, and nothing larger than the result is ever allocated.
"""

from collections.abc import Sequence

import torch

__all__ = ["unpack_columns", "unpack_rows"]


def unpack_rows(words: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return the codes of words that hold consecutive rows.

    Args:
        words: int32 [rows, columns].
        bits: of one code: 4 or 8.

    Returns:
        uint8 [rows * 32 / bits, columns]: slot j of a word, at bit j * bits, is its j-th row.
    """
    octets, slots = _octets(words), 32 // bits
    codes = torch.empty(
        (words.shape[0], slots, words.shape[1]), dtype=torch.uint8, device=words.device
    )
    for slot in range(slots):
        octet, shift = divmod(slot * bits, 8)
        torch.bitwise_and(octets[..., octet] >> shift, 2**bits - 1, out=codes[:, slot])
    return codes.view(-1, words.shape[1])


def unpack_columns(
    words: torch.Tensor, *, bits: int, slot_of: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the codes of words that hold consecutive columns.

    Args:
        words: int32 [rows, columns].
        bits: of one code: 4 or 8.
        slot_of: in which slot of its word each column lies; None is the plain order.

    Returns:
        uint8 [rows, columns * 32 / bits].
    """
    octets, slots = _octets(words), 32 // bits
    codes = torch.empty((*words.shape, slots), dtype=torch.uint8, device=words.device)
    for column in range(slots):
        slot = column if slot_of is None else slot_of[column]
        octet, shift = divmod(slot * bits, 8)
        torch.bitwise_and(octets[..., octet] >> shift, 2**bits - 1, out=codes[..., column])
    return codes.view(words.shape[0], -1)


def _octets(words: torch.Tensor) -> torch.Tensor:
    # A dimension of size 1 may keep any stride and count as contiguous; bytes need strides of 1.
    flat = words.contiguous().as_strided((words.numel(),), (1,))
    return flat.view(torch.uint8).view(*words.shape, 4)
