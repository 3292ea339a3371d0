"""The metrics port: a page at /, /now.json for it and `qlinear top`, /metrics, /healthz for probes.

Runs in threads of its own, so a scrape never waits for the event loop nor the other way round; it
reads metrics and changes nothing. It starts before the data port and stops after it.
"""

import contextlib
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.exposition import choose_encoder

from qlinear_service.errors import ConfigError
from qlinear_service.log_values import event
from qlinear_service.metrics import Metrics
from qlinear_service.watch.history import History
from qlinear_service.watch.now import now, to_json
from qlinear_service.watch.page import PAGE, POLICY

__all__ = ["serve_metrics"]

logger = logging.getLogger(__name__)

CLIENT_SECONDS = 10.0
"""How long a client may take to send its request or to read the answer."""

PAGE_HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}


@contextlib.contextmanager
def serve_metrics(metrics: Metrics, *, host: str, port: int) -> Iterator[str | None]:
    """Serve `metrics` while inside; yield HOST:PORT, or None for the port -1, which means off.

    Args:
        metrics: what is shown.
        host: address to listen on.
        port: 0 picks a free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if port == -1:
        yield None
        return
    server = _bind(metrics, host, port)
    thread = threading.Thread(
        target=server.serve_forever, args=(0.05,), name="metrics", daemon=True
    )
    thread.start()
    try:
        yield _address(host, server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _address(host: str, port: object) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(metrics: Metrics, host: str, port: int) -> "_Server":
    try:
        return _Server(metrics, host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {_address(host, port)} for metrics: {error.strerror}; choose "
            "another port with --metrics-port, or -1 for no metrics"
        ) from None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that is slow to read must not hold up the end

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self.metrics = metrics
        self.history = History(metrics)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of our own name, which can hang for seconds."""
        socketserver.TCPServer.server_bind(self)

    def service_actions(self) -> None:
        """Remember the present; `serve_forever` calls this between its looks for requests."""
        self.history.tick()

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep clients that hang up out of stderr."""
        error = sys.exception()
        event(logger, logging.DEBUG, "metrics_client_failed", client=client_address, exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        """Answer one request."""
        metrics = self.server.metrics
        path = urlsplit(self.path).path
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, content_type, encode(metrics.registry))
        elif path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", PAGE, PAGE_HEADERS)
        elif path == "/now.json":
            body = to_json(now(metrics, self.server.history))
            self._answer(HTTPStatus.OK, "application/json", body, PAGE_HEADERS)
        elif path == "/healthz":
            state = metrics.state()
            code = HTTPStatus.OK if state == "serving" else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(code, "text/plain; charset=utf-8", f"{state}\n".encode())
        else:
            text = b"there are /, /metrics, /healthz and /now.json\n"
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", text)

    def _answer(
        self,
        code: HTTPStatus,
        content_type: str,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests at debug level only: there is one every few seconds, for ever."""
        event(logger, logging.DEBUG, "metrics_request", text=format % args)
