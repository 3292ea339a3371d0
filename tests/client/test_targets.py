"""Addresses of servers: which are refused at once, and what is said where nobody answers."""

import socket
from typing import Any

import numpy as np
import pytest

from qlinear_client import AsyncClient, Client, InvalidArgument, Unavailable
from qlinear_client._targets import checked_target, plain_words


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051",
        "localhost:1",
        "[::1]:65535",
        "dns:50051",
        "dns:///qlinear.models.svc:50051",
        "dns://127.0.0.1:53/name:50051",
        "ipv4:10.0.0.1:50051,10.0.0.2:50051",
        "unix:/tmp/socket",
        "unix:socket",
    ],
)
def test_addresses_pass_as_they_are(target: str) -> None:
    assert checked_target(target) == target


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "target",
    ["", None, 50051, "127.0.0.1", "name", "name:", ":50051", "name:0", "127.0.0.1:99999",
     "http://127.0.0.1:50051", "https://name:50051", "[::1]", "name:http"],
)  # fmt: skip
def test_what_cannot_be_an_address_is_refused_before_anything_is_sent(
    target: Any, kind: Any
) -> None:
    with pytest.raises(InvalidArgument, match='expected "host:port"') as refused:
        kind(target)
    assert refused.value.message.startswith(f"target is {target!r}; ")


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_where_nobody_listens_the_error_names_address_and_reason(
    connect: Any, transport: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"127.0.0.1:{free.getsockname()[1]}"
    client = connect(target, transport=transport, max_retries=0)
    with pytest.raises(Unavailable) as gone:
        client.matmul("toy/a", np.ones((1, 6), np.float32))
    assert gone.value.message.startswith(f"no server answers at {target}: Connection refused")
    assert gone.value.message.endswith("is this its port (--port, 50051 by default)?")


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            "connections to all backends failing; last error: UNAVAILABLE: ipv4:127.0.0.1:9464: "
            "Failed parsing HTTP/2",
            "no server answers at 127.0.0.1:9464: Failed parsing HTTP/2; is it running, and is "
            "this its port (--port, 50051 by default)?",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:7: Failed to "
            "connect to remote host: connect: Connection refused (111)",
            "no server answers at [::1]:7: Connection refused (111); is it running, and is this "
            "its port (--port, 50051 by default)?",
        ),
        (
            "DNS resolution failed for no.invalid:50051: C-ares status is not ARES_SUCCESS "
            "qtype=A name=no.invalid is_balancer=0: Domain name not found",
            "the name of no.invalid:50051 leads nowhere: Domain name not found; is it right?",
        ),
        (
            "Deadline Exceeded",
            "no answer came before the deadline; is a server there, or too busy for it?",
        ),
    ],
)
def test_grpcs_words_become_one_sentence(details: str, words: str) -> None:
    assert plain_words(details) == words


@pytest.mark.parametrize(
    "details",
    ["", "the server is draining", "failed to connect to all addresses",
     "failed to connect to all addresses; last error: what"],
)  # fmt: skip
def test_other_words_stay(details: str) -> None:
    assert plain_words(details) == details
