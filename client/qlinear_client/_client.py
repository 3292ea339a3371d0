"""The blocking client: a channel around `_core`. Its async twin is `_async_client.py`.

Only what waits or holds a connection is here; what is sent and what an answer means is `_core`'s.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import grpc

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1.linear_pb2_grpc import QuantizedLinearStub
from qlinear_client import _core
from qlinear_client._config import (
    DEFAULT,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_SECONDS,
    DEFAULT_TRANSPORT,
    channel_options,
)
from qlinear_client._errors import CallError, Cancelled, DeadlineExceeded
from qlinear_client._info import LayerInfo, ServerInfo
from qlinear_client._retries import Retries, SendAlone
from qlinear_client._sync_stream import SyncStream

__all__ = ["Client"]

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Client:
    """Calls one qlinear server (or the replicas behind one name) and waits for the answers.

    Threads may share a client. It connects at the first call and reconnects by itself; close it,
    or use it as a context manager, to free the connection.

        with Client("localhost:50051") as client:
            y = client.matmul("model/encoder.dense", x)  # x [..., k] -> y [..., n]

    Args:
        target: "host:port", or any gRPC target such as "dns:///name:port".
        timeout: default deadline of a call in seconds; None = no deadline.
        transport: "stream" sends the matmuls of this client on one stream, "unary" each as a
            call of its own; results are the same.
        max_retries: how often a call that failed is sent again where that can help: the server
            asks for it, or none was reached. Never after the deadline; 0 = never.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        transport: str = DEFAULT_TRANSPORT,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        self._session = _core.Session(target, timeout, transport=transport, max_retries=max_retries)
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._channels: list[grpc.Channel] = []
        self._stub: QuantizedLinearStub | None = None
        self._opened_bytes = 0
        self._stream: SyncStream | None = None
        self._streams: set[SyncStream] = set()
        # A client that nobody closed leaves no stream behind; at exit the process does that.
        weakref.finalize(self, _close, self._streams).atexit = False

    @overload
    def matmul(
        self,
        layer: str,
        x: object,
        *,
        output_dtype: object = None,
        timeout: _core.Timeout = DEFAULT,
        priority: int = 0,
    ) -> Any: ...
    @overload
    def matmul(
        self,
        layer: list[str] | tuple[str, ...],
        x: object,
        *,
        output_dtype: object = None,
        timeout: _core.Timeout = DEFAULT,
        priority: int = 0,
    ) -> list[Any]: ...
    def matmul(
        self,
        layer: str | Sequence[str],
        x: object,
        *,
        output_dtype: object = None,
        timeout: _core.Timeout = DEFAULT,
        priority: int = 0,
    ) -> Any:
        """Return x · W^T + bias of a layer.

        Args:
            layer: "<model>/<module>", or "<module>" where one model alone has it; a list of
                layers with the same k gives a list of results, all or none.
            x: [..., k] float16, bfloat16 or float32: numpy array, torch tensor, or an object with
                the buffer protocol. Gradients do not flow through a call.
            output_dtype: name or dtype of the result; None = that of x.
            timeout: seconds until the answer must be there; None = no deadline.
            priority: 0 = normal, up to 9 = more urgent.

        Returns:
            [..., n], writable, in the array library (and on the device) of x.

        Raises:
            CallError: one of its subclasses, by status.
        """
        call = _core.prepare_matmul(layer, x, output_dtype=output_dtype, priority=priority)
        deadline = self._session.deadline(timeout)
        info = self._session.info or self._first_info(deadline)
        # Before refusing, ask once more: the server may have been restarted with larger limits.
        if call.refusal(info) and (refusal := call.refusal(self._fetch_info(deadline))):
            raise refusal
        attempt = functools.partial(self._attempt_matmul, call, deadline)
        return call.results_from(self._retrying(attempt, deadline))

    def list_layers(
        self, model: str | None = None, *, timeout: _core.Timeout = DEFAULT
    ) -> list[LayerInfo]:
        """Return the loaded layers: all, or those of one model."""
        request = pb.ListLayersRequest(model=model or "")
        deadline = self._session.deadline(timeout)
        return _core.layers_from(self._send(self._open().ListLayers, request, deadline))

    def server_info(self, *, timeout: _core.Timeout = DEFAULT) -> ServerInfo:
        """Ask the server for its version, device and limits."""
        return self._fetch_info(self._session.deadline(timeout))

    def close(self) -> None:
        """Free the connection; calls that still wait end with `Cancelled`. Twice is harmless."""
        with self._lock:
            self._closing.set()
            channels, self._channels = self._channels, []
            streams = list(self._streams)
        _close(streams)
        for channel in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _first_info(self, deadline: _core.Deadline) -> ServerInfo:
        """Return what the server says of itself, asked once for all calls of a first burst."""
        left = deadline.remaining_seconds()
        if not self._asking.acquire(timeout=-1 if left is None else left):
            raise DeadlineExceeded("the deadline passed while the server was asked")
        try:
            return self._session.info or self._fetch_info(deadline)
        finally:
            self._asking.release()

    def _fetch_info(self, deadline: _core.Deadline) -> ServerInfo:
        request = pb.GetServerInfoRequest()
        return self._session.learn(self._send(self._open().GetServerInfo, request, deadline))

    def _open(self) -> QuantizedLinearStub:
        with self._lock:
            return self._open_locked()

    def _open_locked(self) -> QuantizedLinearStub:
        """Return the stub of a channel that receives as much as the server may send."""
        if self._closing.is_set():
            raise RuntimeError("this client is closed")
        needed_bytes = self._session.receive_bytes
        if self._stub is None or self._opened_bytes < needed_bytes:
            # The channel that it replaces stays open until close(): calls may be on it.
            channel = grpc.insecure_channel(
                self._session.target, options=channel_options(needed_bytes)
            )
            self._channels.append(channel)
            self._opened_bytes = needed_bytes
            self._stub = QuantizedLinearStub(channel)
        return self._stub

    def _open_stream(self) -> SyncStream:
        """Return a stream that takes calls, on the newest channel."""
        with self._lock:
            method = self._open_locked().MatMulStream
            stream = self._stream
            if stream is None or not stream.is_open or stream.method is not method:
                if stream is not None:
                    stream.finish()
                self._streams -= {other for other in self._streams if other.has_ended}
                self._stream = stream = SyncStream(method)
                self._streams.add(stream)
            return stream

    def _send(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Reply]",
        request: Request,
        deadline: _core.Deadline,
    ) -> Reply:
        return self._retrying(functools.partial(self._attempt, method, request, deadline), deadline)

    def _retrying(self, attempt: Callable[[], Reply], deadline: _core.Deadline) -> Reply:
        """Return what `attempt` returns, tried again where that helps."""
        retries = Retries(self._session.max_retries)
        while True:
            try:
                return attempt()
            except CallError as error:
                pause = retries.pause_seconds(error, deadline)
            if self._closing.wait(pause):
                raise Cancelled("the client was closed while the call waited")

    def _attempt_matmul(
        self, call: _core.MatMulCall, deadline: _core.Deadline
    ) -> pb.MatMulResponse:
        if self._session.uses_streams:
            try:
                return self._open_stream().call(call.message, deadline)
            except SendAlone as reason:
                self._session.leave_streams(reason)
        return self._attempt(self._open().MatMul, call.request, deadline)

    def _attempt(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Reply]",
        request: Request,
        deadline: _core.Deadline,
    ) -> Reply:
        try:
            return method(request, timeout=deadline.remaining_seconds())
        except grpc.RpcError as error:
            raise _core.call_error(error) from error
        except ValueError:
            if self._closing.is_set():  # closed by another thread between _open and here
                raise RuntimeError("this client is closed") from None
            raise


def _close(streams: Iterable[SyncStream]) -> None:
    for stream in streams:
        stream.close()
