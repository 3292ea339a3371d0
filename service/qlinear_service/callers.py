"""Who a call is from, as far as sharing evenly goes: its own word, else where it comes from.

No proof of anything: a client that takes another's name shares its turns with it.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc

__all__ = ["CLIENT_KEY", "client_of"]

CLIENT_KEY = "qlinear-client-id"

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def client_of(context: Context, metadata: Iterable[tuple[str, Any]]) -> str:
    """Return the metadata `qlinear-client-id`, else the peer's address, without its port.

    Args:
        context: of the call or stream.
        metadata: its own, which each question to the context makes anew.
    """
    for key, value in metadata:
        if key == CLIENT_KEY and value:
            return f"id:{value!s}"
    # "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711": all connections of a machine are one client.
    return str(context.peer()).rpartition(":")[0]
