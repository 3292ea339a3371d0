"""The metrics port against clients that are rude: each gets an answer, and nobody is shut out."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from measured_layers import Spec, everything, metrics_of, samples_of, value
from metrics_process import get
from watched_metrics import port_of

from qlinear_service import metrics_server
from qlinear_service.errors import ConfigError
from qlinear_service.metrics import Metrics

WAIT_SECONDS = 20.0


@pytest.fixture
def metrics() -> Metrics:
    made = metrics_of(Spec("up", n=16))
    everything(made)
    return made


@pytest.fixture
def port(metrics: Metrics) -> Iterator[str]:
    with port_of(metrics) as address:
        yield address


def connected(address: str) -> socket.socket:
    host, _, number = address.rpartition(":")
    return socket.create_connection((host, int(number)), timeout=WAIT_SECONDS)


def raw(address: str, request: bytes) -> bytes:
    """Send these bytes and return all that comes back."""
    with connected(address) as client, client.makefile("rb") as file:
        client.sendall(request)
        return file.read()


def test_a_host_that_is_not_here_is_what_the_error_speaks_of(metrics: Metrics) -> None:
    away = "192.0.2.1"  # reserved for documentation
    with (
        pytest.raises(
            ConfigError, match=r"^cannot listen on 192\.0\.2\.1:0 for metrics: "
        ) as refused,
        metrics_server.serve_metrics(metrics, host=away, port=0),
    ):
        pass
    assert str(refused.value).endswith("; name a host of this machine with --host")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://[::1 HTTP/1.1", b"400"),
        (b"GET //[ HTTP/1.1", b"404"),
        (b"GET /metrics/ HTTP/1.1", b"404"),
        (b"GET /%00 HTTP/1.1", b"404"),
        (b"GET /../etc/passwd HTTP/1.1", b"404"),
        (b"GET /metrics?name[]=x#y HTTP/1.1", b"200"),
        (b"POST /metrics HTTP/1.1", b"501"),
        (b"GET /metrics HTTP/1.1\r\nAccept: \xff\xfe;;,=,q=", b"200"),
        (b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=x; q=y", b"200"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000, b"431"),
    ],
    ids=range(10),
)
def test_any_request_has_an_answer(port: str, line: bytes, status: bytes) -> None:
    answer = raw(port, line + b"\r\n\r\n")
    assert answer.split()[1] == status, answer[:200]
    assert b"Python" not in answer


@pytest.mark.parametrize("path", [b"/", b"/metrics", b"/now.json", b"/healthz", b"/none"])
def test_head_is_get_without_a_body(port: str, path: bytes) -> None:
    head = raw(port, b"HEAD " + path + b" HTTP/1.1\r\n\r\n")
    whole = raw(port, b"GET " + path + b" HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    names = [line.split(b":")[0] for line in whole[0].splitlines()]
    assert [line.split(b":")[0] for line in head.splitlines() if line] == names
    assert head.endswith(b"\r\n\r\n")
    assert whole[2]


def test_what_cannot_be_shown_is_said_and_logged(
    port: str, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.families["qlinear_requests_total"].number("MatMul", "\ud800", "OK").value = 1
    answer = raw(port, b"GET /metrics?" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n")
    assert answer.split()[1] == b"500"
    assert answer.endswith(b"this could not be shown; the server's log says why\n")
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert record.getMessage().startswith("metrics_failed path=/metrics?xxx")
    assert len(record.getMessage()) < 300
    assert record.exc_info is not None
    assert "serving" in get(port, "/healthz")[0]


@pytest.mark.parametrize("path", ["/metrics", "/now.json"])
def test_one_is_rendered_at_a_time(
    port: str, metrics: Metrics, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred scrapes at once are no hundred threads that want the event loop's interpreter."""
    inside, most = 0, 0
    pulled, live = metrics.pulled, metrics.live

    def slowly(look: Callable[[], Any]) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        return look()

    monkeypatch.setattr(metrics, "pulled", lambda: slowly(pulled))
    monkeypatch.setattr(metrics, "live", lambda: slowly(live))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: get(port, path)[0], range(16)))
    assert all(answers)
    assert most == 1


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_many_silent_clients_shut_nobody_out_and_have_few_threads(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "MOST_CLIENTS", 8)
    before = threads()
    silent = [connected(port) for _ in range(50)]
    try:
        samples = samples_of(get(port, "/metrics")[0])
        assert value(samples, "qlinear_layers_loaded") == 1
        # Those that came first were hung up on; the last are waited for.
        assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert silent[-1].recv(1) == b"H"
        assert threads() - before <= 9
    finally:
        for client in silent:
            client.close()


def test_a_client_that_drips_is_hung_up_on(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never silent for long, and would keep its thread for ever."""
    monkeypatch.setattr(metrics_server, "LONGEST_SECONDS", 0.5)
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nA: ")
        with pytest.raises(OSError, match=r"reset|pipe|closed"):
            drip(client)


def drip(client: socket.socket) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        client.sendall(b"b")
        time.sleep(0.05)
