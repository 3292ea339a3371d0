"""The asyncio client: a grpc.aio channel around `_core`. Its blocking twin is `_client.py`.

Only what waits or holds a connection is here; what is sent and what an answer means is `_core`'s.
"""

import asyncio
import functools
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import grpc
import grpc.aio

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1.linear_pb2_grpc import QuantizedLinearStub
from qlinear_client import _core
from qlinear_client._async_stream import AsyncStream
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

if TYPE_CHECKING:  # the stub file has this class, the generated module does not
    from qlinear.v1.linear_pb2_grpc import QuantizedLinearAsyncStub

__all__ = ["AsyncClient"]

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class AsyncClient:
    """Calls one qlinear server (or the replicas behind one name) from an asyncio program.

    Tasks of one event loop may share a client. It connects at the first call and reconnects by
    itself; close it, or use it with `async with`, to free the connection.

        async with AsyncClient("localhost:50051") as client:
            y = await client.matmul("model/encoder.dense", x)  # x [..., k] -> y [..., n]

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
        self._closed = False
        self._asking = asyncio.Lock()
        self._channels: list[grpc.aio.Channel] = []
        self._stub: QuantizedLinearAsyncStub | None = None
        self._opened_bytes = 0
        self._stream: AsyncStream | None = None
        self._streams: set[AsyncStream] = set()
        # A client that nobody closed leaves no stream behind; at exit the process does that.
        weakref.finalize(self, _close_soon, self._streams).atexit = False

    @overload
    async def matmul(
        self,
        layer: str,
        x: object,
        *,
        output_dtype: object = None,
        timeout: _core.Timeout = DEFAULT,
        priority: int = 0,
    ) -> Any: ...
    @overload
    async def matmul(
        self,
        layer: list[str] | tuple[str, ...],
        x: object,
        *,
        output_dtype: object = None,
        timeout: _core.Timeout = DEFAULT,
        priority: int = 0,
    ) -> list[Any]: ...
    async def matmul(
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
        info = self._session.info or await self._first_info(deadline)
        # Before refusing, ask once more: the server may have been restarted with larger limits.
        if call.refusal(info) and (refusal := call.refusal(await self._fetch_info(deadline))):
            raise refusal
        attempt = functools.partial(self._attempt_matmul, call, deadline)
        return call.results_from(await self._retrying(attempt, deadline))

    async def list_layers(
        self, model: str | None = None, *, timeout: _core.Timeout = DEFAULT
    ) -> list[LayerInfo]:
        """Return the loaded layers: all, or those of one model."""
        request = pb.ListLayersRequest(model=model or "")
        deadline = self._session.deadline(timeout)
        return _core.layers_from(await self._send(self._open().ListLayers, request, deadline))

    async def server_info(self, *, timeout: _core.Timeout = DEFAULT) -> ServerInfo:
        """Ask the server for its version, device and limits."""
        return await self._fetch_info(self._session.deadline(timeout))

    async def close(self) -> None:
        """Free the connection; calls that still wait end with `Cancelled`. Twice is harmless."""
        self._closed = True
        channels, self._channels = self._channels, []
        for stream in list(self._streams):
            await stream.close()
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _first_info(self, deadline: _core.Deadline) -> ServerInfo:
        """Return what the server says of itself, asked once for all calls of a first burst."""
        try:
            async with asyncio.timeout(deadline.remaining_seconds()):
                await self._asking.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the server was asked") from None
        try:
            return self._session.info or await self._fetch_info(deadline)
        finally:
            self._asking.release()

    async def _fetch_info(self, deadline: _core.Deadline) -> ServerInfo:
        request = pb.GetServerInfoRequest()
        return self._session.learn(await self._send(self._open().GetServerInfo, request, deadline))

    def _open(self) -> "QuantizedLinearAsyncStub":
        """Return the stub of a channel that receives as much as the server may send."""
        if self._closed:
            raise RuntimeError("this client is closed")
        needed_bytes = self._session.receive_bytes
        if self._stub is None or self._opened_bytes < needed_bytes:
            # The channel that it replaces stays open until close(): calls may be on it.
            # Opened here and not in __init__ because a channel belongs to the running loop.
            channel = grpc.aio.insecure_channel(
                self._session.target, options=channel_options(needed_bytes)
            )
            self._channels.append(channel)
            self._opened_bytes = needed_bytes
            self._stub = QuantizedLinearStub(channel)
        return self._stub

    def _open_stream(self) -> AsyncStream:
        """Return a stream that takes calls, on the newest channel."""
        method = self._open().MatMulStream
        stream = self._stream
        if stream is None or not stream.is_open or stream.method is not method:
            if stream is not None:
                stream.finish()
            self._streams -= {other for other in self._streams if other.has_ended}
            self._stream = stream = AsyncStream(method)
            self._streams.add(stream)
        return stream

    async def _send(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Reply]",
        request: Request,
        deadline: _core.Deadline,
    ) -> Reply:
        return await self._retrying(
            functools.partial(self._attempt, method, request, deadline), deadline
        )

    async def _retrying(
        self, attempt: Callable[[], Awaitable[Reply]], deadline: _core.Deadline
    ) -> Reply:
        """Return what `attempt` returns, tried again where that helps."""
        retries = Retries(self._session.max_retries)
        while True:
            try:
                return await attempt()
            except CallError as error:
                pause = retries.pause_seconds(error, deadline)
            await asyncio.sleep(pause)

    async def _attempt_matmul(
        self, call: _core.MatMulCall, deadline: _core.Deadline
    ) -> pb.MatMulResponse:
        if self._session.uses_streams:
            try:
                return await self._open_stream().call(call.message, deadline)
            except SendAlone as reason:
                self._session.leave_streams(reason)
        return await self._attempt(self._open().MatMul, call.request, deadline)

    async def _attempt(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Reply]",
        request: Request,
        deadline: _core.Deadline,
    ) -> Reply:
        try:
            return await method(request, timeout=deadline.remaining_seconds())
        except grpc.RpcError as error:
            raise _core.call_error(error) from error
        except grpc.aio.UsageError:
            if self._closed:  # while this call waited for its next attempt
                raise Cancelled("the client was closed while the call waited") from None
            raise
        except asyncio.CancelledError:
            # Closing the channel cancels the call, not the task: only then it is an error of ours.
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise Cancelled("the client was closed while the call waited") from None
            raise


def _close_soon(streams: set[AsyncStream]) -> None:
    for stream in streams:
        stream.close_soon()
