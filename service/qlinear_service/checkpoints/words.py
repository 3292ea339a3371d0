"""Unpacks 32-bit words into the codes that lie in them, lowest bits first."""

import torch

__all__ = ["unpack_words"]


def unpack_words(words: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return the codes of every word.

    Args:
        words: int32 [rows, columns].
        bits: of one code: 4 or 8.

    Returns:
        uint8 [rows, 32 / bits, columns]: slot j holds the code at bit j * bits of the word.
    """
    # Bytes of a word come lowest first (files and every supported machine are little-endian).
    # Bytes have no sign bit to drag in, and nothing larger than the result is ever allocated.
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    slots = 32 // bits
    codes = torch.empty((words.shape[0], slots, words.shape[1]), dtype=torch.uint8)
    for slot in range(slots):
        octet, shift = divmod(slot * bits, 8)
        torch.bitwise_and(octets[..., octet] >> shift, 2**bits - 1, out=codes[:, slot])
    return codes
