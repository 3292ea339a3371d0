"""The metrics port: a page at /, /now.json for it and `qlinear top`, /metrics, /healthz for probes.

Runs in threads of its own, so a scrape never waits for the event loop nor the other way round; it
reads metrics and changes nothing. It starts before the data port and stops after it.
"""

import contextlib
import errno
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
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
"""How long a client may be silent while it sends its request or reads the answer."""

LONGEST_SECONDS = 30.0
"""How long one may take for all of it."""

MOST_CLIENTS = 64
"""Each has a thread. Of more, those that came first are hung up on: a scrape gets through."""

MOST_LOGGED = 200
"""Characters of a path in the log."""

Found: TypeAlias = tuple[HTTPStatus, str, bytes, dict[str, str]]
"""Status, content type, body and further headers of an answer."""

TEXT = "text/plain; charset=utf-8"

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
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            advice = "name a host of this machine with --host"
        else:
            advice = "choose another port with --metrics-port, or -1 for no metrics"
        raise ConfigError(
            f"cannot listen on {_address(host, port)} for metrics: {error.strerror}; {advice}"
        ) from None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that is slow to read must not hold up the end
    request_queue_size = MOST_CLIENTS

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self.metrics = metrics
        self.history = History(metrics)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.rendering = threading.Lock()
        """One at a time: many would take the interpreter away from the event loop."""
        self._clients: dict[Any, float] = {}  # sockets in the order in which they came
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of our own name, which can hang for seconds."""
        socketserver.TCPServer.server_bind(self)

    def service_actions(self) -> None:
        """Remember the present; `serve_forever` calls this between its looks for requests."""
        self.history.tick()
        oldest = time.monotonic() - LONGEST_SECONDS
        for client, came in list(self._clients.items()):
            if came < oldest:
                _hang_up(client)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; make room for it first."""
        for client in list(self._clients)[: max(len(self._clients) - MOST_CLIENTS + 1, 0)]:
            self._clients.pop(client, None)
            _hang_up(client)
        self._clients[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a client that has its answer, or has been hung up on."""
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep clients that hang up out of stderr."""
        error = sys.exception()
        event(logger, logging.DEBUG, "metrics_client_failed", client=client_address, exc_info=error)


def _hang_up(client: socket.socket) -> None:
    """Wake the thread that waits for a client; it will close the socket."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return what writes the format that a client accepts; one that cannot be read is no wish."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        return choose_encoder("")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS
    server_version = "qlinear"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one request, whatever happens."""
        try:
            found = self._found()
        except Exception as error:
            path = self.path[:MOST_LOGGED]
            event(logger, logging.ERROR, "metrics_failed", path=path, exc_info=error)
            text = b"this could not be shown; the server's log says why\n"
            found = HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, text, {}
        self._answer(*found)

    def do_HEAD(self) -> None:
        """Answer as to GET, without a body."""
        self.do_GET()

    def _found(self) -> Found:
        metrics = self.server.metrics
        try:
            path = urlsplit(self.path).path
        except ValueError:
            return HTTPStatus.BAD_REQUEST, TEXT, b"this is no URL\n", {}
        if path == "/metrics":
            encode, content_type = _encoder(self.headers.get("Accept", ""))
            with self.server.rendering:
                return HTTPStatus.OK, content_type, encode(metrics.registry), {}
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", PAGE, PAGE_HEADERS
        if path == "/now.json":
            with self.server.rendering:
                body = to_json(now(metrics, self.server.history))
            return HTTPStatus.OK, "application/json", body, PAGE_HEADERS
        if path == "/healthz":
            state = metrics.state()
            code = HTTPStatus.OK if state == "serving" else HTTPStatus.SERVICE_UNAVAILABLE
            return code, TEXT, f"{state}\n".encode(), {}
        text = b"there are /, /metrics, /healthz and /now.json\n"
        return HTTPStatus.NOT_FOUND, TEXT, text, {}

    def _answer(
        self, code: HTTPStatus, content_type: str, body: bytes, headers: dict[str, str]
    ) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests at debug level only: there is one every few seconds, for ever."""
        event(logger, logging.DEBUG, "metrics_request", text=format % args)
