"""Client of a qlinear server: activations in, x · W^T + bias out, sync or async.

Needs grpcio, protobuf and numpy; neither torch nor anything of the server. Everything public is
here; modules with an underscore are private.
"""

from qlinear_client._async_client import AsyncClient
from qlinear_client._client import Client
from qlinear_client._config import VERSION as __version__
from qlinear_client._errors import (
    CallError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from qlinear_client._info import LayerInfo, ServerInfo

__all__ = [
    "AsyncClient",
    "CallError",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Internal",
    "InvalidArgument",
    "LayerInfo",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "ServerInfo",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "__version__",
]
