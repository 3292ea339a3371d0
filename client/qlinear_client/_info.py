"""What a server tells of itself and of its layers, as plain values.

Field names are those of `GetServerInfoResponse` and `Layer` in linear.proto; a test compares them.
"""

from dataclasses import dataclass

__all__ = ["LayerInfo", "ServerInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """One loaded layer: y[..., n] = x[..., k] · W^T + bias."""

    name: str
    """The full name, "<model>/<module>"."""
    model: str
    n: int
    """Output features."""
    k: int
    """Input features."""
    bits: int
    """Bits of one weight code: 4 or 8; 16 is a layer that is not quantized."""
    group_size: int
    """Input features that share a scale; -1: the whole column."""
    symmetric: bool
    has_bias: bool
    scale_dtype: str
    """float16, bfloat16 or float32."""
    device: str
    packed_bytes: int
    """Bytes of the weights as stored."""
    sweet_spot_rows: int
    """Rows up to which a call costs about as much as one row; 0 = not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server's version, device and limits; a limit of 0 is not published."""

    version: str
    layout_version: int
    """Version of the packed weights' runtime layout."""
    device: str
    read_peak_bytes_per_second: int
    """Largest memory read rate measured at start; 0 = not measured."""
    max_message_bytes: int
    """Transport limit of one message."""
    max_request_bytes: int
    """Limit of the activations of one call."""
    max_request_rows: int
    models: tuple[str, ...]
    batch_invariant: bool
    """True: a call's answer has the same bits in any batch."""
    max_response_bytes: int
    """Limit of the results of one call, summed over its layers."""
