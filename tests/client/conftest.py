"""A small server on loopback that multiplies with numpy, and clients of both kinds for it.

It follows linear.proto on valid calls, unary or streamed; `abort`, `delay_seconds`, `reply` and
`stream_script` make it misbehave.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_client import AsyncClient, Client

K, N = 6, 4
NUMPY_DTYPES = {
    pb.DTYPE_F16: np.dtype("<f2"),
    pb.DTYPE_BF16: np.dtype(ml_dtypes.bfloat16),
    pb.DTYPE_F32: np.dtype("<f4"),
}

Failure = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]


def weight(seed: int) -> np.ndarray:
    """Small integers, so that every product is exact in every dtype."""
    return np.random.default_rng(seed).integers(-3, 4, (N, K)).astype(np.float32)


@dataclass
class FakeServicer(pb_grpc.QuantizedLinearServicer):
    """Answers MatMul and MatMulStream with x · W^T; remembers every request."""

    layers: dict[str, np.ndarray] = field(
        default_factory=lambda: {"toy/a": weight(1), "toy/b": weight(2)}
    )
    info: pb.GetServerInfoResponse = field(
        default_factory=lambda: pb.GetServerInfoResponse(
            version="9.9",
            max_message_bytes=64 << 20,
            max_request_bytes=32 << 20,
            max_request_rows=65536,
            max_response_bytes=256 << 20,
            models=["toy"],
        )
    )
    abort: Failure | None = None
    aborts_left: int = 1 << 30
    """How often `abort` applies."""
    streams: bool = True
    streams_opened: int = 0
    stream_script: Callable[[Any, Any], Iterator[pb.StreamResponse]] | None = None
    """What to do on a stream instead: requests and context in, responses out."""
    messages: list[pb.StreamRequest] = field(default_factory=list)
    delay_seconds: float = 0.0
    reply: pb.MatMulResponse | None = None
    requests: list[pb.MatMulRequest] = field(default_factory=list)
    info_calls: int = 0
    arrived: Event = field(default_factory=Event)
    released: Event = field(default_factory=Event)
    target: str = ""

    def MatMul(self, request: pb.MatMulRequest, context: Any) -> pb.MatMulResponse:
        outcome = self._outcome(request)
        if isinstance(outcome, pb.MatMulResponse):
            return outcome
        code, text, trailers = outcome
        context.set_trailing_metadata(trailers)
        context.abort(code, text)
        raise AssertionError("abort has raised")

    def MatMulStream(self, request_iterator: Any, context: Any) -> Iterator[pb.StreamResponse]:
        """Answer in order, one after the other."""
        self.streams_opened += 1
        if not self.streams:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fake has no stream")
        if self.stream_script is not None:
            yield from self.stream_script(request_iterator, context)
            return
        for message in request_iterator:
            self.messages.append(message)
            if message.HasField("call"):
                yield self.streamed(message)

    def streamed(self, message: pb.StreamRequest) -> pb.StreamResponse:
        """Return the answer to one call of a stream."""
        outcome = self._outcome(message.call)
        if isinstance(outcome, pb.MatMulResponse):
            return pb.StreamResponse(request_id=message.request_id, result=outcome)
        code, text, trailers = outcome
        pushback = int(dict(trailers).get("grpc-retry-pushback-ms", 0))
        error = pb.Error(
            code=code.value[0], message=text, retry_after_nanoseconds=pushback * 1_000_000
        )
        return pb.StreamResponse(request_id=message.request_id, error=error)

    def _outcome(self, request: pb.MatMulRequest) -> "pb.MatMulResponse | Failure":
        self.requests.append(request)
        self.arrived.set()
        if self.delay_seconds:
            self.released.wait(self.delay_seconds)
        if self.abort is not None and self.aborts_left:
            self.aborts_left -= 1
            return self.abort
        if self.reply is not None:
            return self.reply
        names = [request.layer] if request.layer else list(request.layers)
        for name in names:
            if name not in self.layers:
                return grpc.StatusCode.NOT_FOUND, f"no layer is called {name!r}", ()
        return pb.MatMulResponse(y=[self._product(request, name) for name in names])

    def _product(self, request: pb.MatMulRequest, name: str) -> pb.Tensor:
        x = np.frombuffer(request.x.data, NUMPY_DTYPES[request.x.dtype]).reshape(request.x.shape)
        dtype = request.output_dtype or request.x.dtype
        y = (x.astype(np.float32) @ self.layers[name].T).astype(NUMPY_DTYPES[dtype])
        return pb.Tensor(dtype=dtype, shape=y.shape, data=y.tobytes())

    def ListLayers(self, request: pb.ListLayersRequest, context: Any) -> pb.ListLayersResponse:
        layers = [
            pb.Layer(name=name, model="toy", n=N, k=K, bits=4, scale_dtype=pb.DTYPE_BF16)
            for name in self.layers
            if request.model in ("", "toy")
        ]
        return pb.ListLayersResponse(layers=layers)

    def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        self.info_calls += 1
        return self.info


def serving() -> Iterator[FakeServicer]:
    """A fake server that listens at its `target`, until the generator is closed."""
    servicer = FakeServicer()
    # Messages of any size: what a client may receive is the client's limit in these tests.
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=unlimited)
    pb_grpc.add_QuantizedLinearServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    servicer.released.set()
    server.stop(None).wait()


@pytest.fixture
def fake() -> Iterator[FakeServicer]:
    """A fake server that listens at `fake.target`."""
    yield from serving()


@pytest.fixture
def other_fake() -> Iterator[FakeServicer]:
    """A second one."""
    yield from serving()


class Blocking:
    """Gives an AsyncClient the face of a Client."""

    def __init__(self, target: str, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(target, **options)  # made outside the loop that uses it

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.client, name)
        if not inspect.iscoroutinefunction(member):
            return member
        return lambda *a, **kw: self.loop.run_until_complete(member(*a, **kw))


@pytest.fixture(params=["stream", "unary"])
def transport(request: pytest.FixtureRequest) -> str:
    """How matmuls travel."""
    return str(request.param)


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, transport: str) -> Iterator[Any]:
    """A function that opens a client of either kind and transport; all are closed at the end."""
    opened: list[Any] = []

    def open_client(target: str, **options: Any) -> Any:
        opened.append(request.param(target, **{"transport": transport, **options}))
        return opened[-1]

    yield open_client
    for client in opened:
        client.close()
        if isinstance(client, Blocking):
            client.loop.close()
