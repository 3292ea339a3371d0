"""Where a server is: addresses that cannot be one, and what gRPC says when nobody is there.

Words only; nothing here opens a channel. Names that gRPC resolves itself ("dns:///name:50051",
"unix:/path") are left to it.
"""

from urllib.parse import unquote

from qlinear_client._errors import InvalidArgument

__all__ = ["checked_target", "plain_words"]

_RESOLVED = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p")
_EXPECTED = 'expected "host:port", as in 127.0.0.1:50051'
_NOT_REACHED = ("connections to all backends failing", "failed to connect to all addresses")
_LAST = "; last error: "
_NO_NAME = "DNS resolution failed for "
_TOO_LATE = "Deadline Exceeded"


def checked_target(target: str) -> str:
    """Return the address of a server as it was given.

    Raises:
        InvalidArgument: it is no "host:port" (gRPC would ask port 0, or 34463 instead of 99999),
            nor a name with one of gRPC's schemes.
    """
    if not isinstance(target, str) or not target:
        raise InvalidArgument(f"target is {target!r}; {_EXPECTED}")
    scheme, _, rest = target.partition(":")
    if scheme in _RESOLVED and not rest.isdecimal():  # a host may be called dns
        return target
    host, _, port = target.rpartition(":")
    if "://" in target or not host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise InvalidArgument(f"target is {target!r}; {_EXPECTED}")
    return target


def plain_words(details: str) -> str:
    """Return what a call ended with, or one clear sentence where gRPC found no server or answer.

    Args:
        details: of a status, gRPC's own or a server's; the latter is returned as it is.
    """
    if details == _TOO_LATE:
        return "no answer came before the deadline; is a server there, or too busy for it?"
    if details.startswith(_NO_NAME):
        name, *_, why = details.removeprefix(_NO_NAME).split(": ")
        return f"the name of {name} leads nowhere: {why}; is it right?"
    if details.startswith(_NOT_REACHED) and _LAST in details:
        _, *words = details.partition(_LAST)[2].split(": ")
        if len(words) >= 2:
            address = unquote(words[0].removeprefix("ipv4:").removeprefix("ipv6:"))
            return (
                f"no server answers at {address}: {words[-1]}; is it running, and is this its port "
                "(--port, 50051 by default)?"
            )
    return details
