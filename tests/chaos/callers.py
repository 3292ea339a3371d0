"""The tasks that call, each a sequence of calls of many kinds that its seed decides."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from chaos.ledger import OK, Ledger
from chaos.requests import Request, draw_request, poison, problem_of
from chaos.truth import Truth
from refused_requests import REFUSED

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_client import AsyncClient, Client

LONGEST_TIMEOUT_SECONDS = 0.2
CHANNEL = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 2000)]
LONGEST_PAUSE_SECONDS = 4.0
SERVICE = "/qlinear.v1.QuantizedLinear"
PLAIN = frozenset({OK})
LATE = frozenset({OK, "DEADLINE_EXCEEDED"})
LEFT = frozenset({OK, "CANCELLED"})
CUT = frozenset({OK, "UNAVAILABLE"})


@dataclass
class World:
    """What callers share."""

    truth: Truth
    ledger: Ledger
    target: str
    cut_target: str
    """The same server behind connections that are cut."""
    same_bits: bool
    """Every row must have the same bits in any company."""
    is_away: Callable[[], bool]
    """Whether the server is being restarted."""
    clients: list[AsyncClient] = field(default_factory=list)
    cut_clients: list[AsyncClient] = field(default_factory=list)
    channels: list[grpc.aio.Channel] = field(default_factory=list)
    blocking: list[Client] = field(default_factory=list)

    async def open(self) -> None:
        """Make clients and channels, which connect when they are used."""
        for transport in ("stream", "unary"):
            for retries in (0, 3):
                more: Any = {"transport": transport, "max_retries": retries, "timeout": 100}
                self.clients += [AsyncClient(self.target, **more) for _ in range(2)]
                self.cut_clients.append(AsyncClient(self.cut_target, **more))
            self.blocking.append(Client(self.target, transport=transport, timeout=100))
        self.channels = [grpc.aio.insecure_channel(self.target, options=CHANNEL) for _ in range(3)]

    async def close(self) -> None:
        """Close all."""
        for client in (*self.clients, *self.cut_clients):
            await client.close()
        for channel in self.channels:
            await channel.close()
        for blocking in self.blocking:
            await asyncio.to_thread(blocking.close)

    async def while_away(self) -> None:
        """Wait, mostly, while there is no server: calls would fail by the thousand."""
        if self.is_away():
            await asyncio.sleep(random.uniform(0, LONGEST_PAUSE_SECONDS))

    def check(self, kind: str, request: Request, answers: Any) -> None:
        """Compare an answer with the truth."""
        problem = problem_of(request, answers, self.truth, same_bits=self.same_bits)
        if problem:
            self.ledger.problem(f"{kind}: wrong answer: {problem}")


class Caller:
    """One task's calls.

    Args:
        world: shared by all.
        seed: decides what is called, in which order.
    """

    def __init__(self, world: World, seed: str) -> None:
        self.world = world
        self._seed = seed
        self.draw = random.Random(seed)
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "plain": (50, self._plain),
            "hasty": (10, self._hasty),
            "cancelled": (10, self._cancelled),
            "cut": (8, self._cut),
            "raw": (6, self._raw),
            "bad": (6, self._bad),
            "poison": (3, self._poison),
            "nan": (2, self._nan),
            "blocking": (2, self._blocking),
            "empty": (1, self._empty),
            "asking": (1, self._asking),
            "hung up": (1, self._hung_up),
        }

    async def run(self, calls: int) -> None:
        """Call so often."""
        names = list(self._kinds)
        weights = [self._kinds[name][0] for name in names]
        for number, name in enumerate(self.draw.choices(names, weights, k=calls)):
            await self.world.while_away()
            # Its own: how one call ends must not decide what the next one is.
            self.draw = random.Random(f"{self._seed} {number}")
            await self._kinds[name][1]()

    def _request(self) -> Request:
        return draw_request(self.draw, self.world.truth)

    async def _call(
        self,
        kind: str,
        clients: list[AsyncClient],
        allowed: frozenset[str],
        timeout: float | None = None,
        *,
        request: Request | None = None,
    ) -> tuple[Request, str, Any]:
        """Send a request through one of the clients, and check its answer."""
        own = request or self._request()
        layers, x = own.arguments(self.draw)
        client, more = self.draw.choice(clients), {} if timeout is None else {"timeout": timeout}
        output = None if own.y_dtype is None else own.y_dtype.text
        call = client.matmul(layers, x, output_dtype=output, priority=own.priority, **more)
        code, answer = await self.world.ledger.end_of(kind, call, allowed)
        if code == OK and request is None:
            self.world.check(kind, own, answer)
        return own, code, answer

    async def _plain(self) -> None:
        await self._call("plain", self.world.clients, PLAIN)

    async def _cut(self) -> None:
        """Over a connection that may be cut at any time; a client that retries calls again."""
        await self._call("cut", self.world.cut_clients, CUT)

    async def _hasty(self) -> None:
        timeout = self.draw.uniform(0.0001, LONGEST_TIMEOUT_SECONDS)
        await self._call("hasty", self.world.clients, LATE, timeout)

    async def _cancelled(self) -> None:
        """Take the call back while it waits, runs or is answered."""
        task = asyncio.create_task(self._call("cancelled", self.world.clients, LEFT))
        await asyncio.sleep(self.draw.choice((0, self.draw.uniform(0, LONGEST_TIMEOUT_SECONDS))))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _poison(self) -> None:
        request = self._request()
        poison(request, self.draw)
        failed = frozenset({"INTERNAL"})
        await self._call("poison", self.world.clients, failed, request=request)

    async def _nan(self) -> None:
        """A row that is no number stays alone with that."""
        request = self._request()
        row = self.draw.randrange(len(request.x))
        request.x[row, 1:] = self.draw.choice((np.nan, np.inf))
        _, code, answer = await self._call("nan", self.world.clients, PLAIN, request=request)
        if code != OK:
            return
        rest = np.delete(np.arange(len(request.x)), row)
        many = answer if isinstance(answer, list) else [answer]
        rows = [y.reshape(-1, y.shape[-1])[rest] for y in many]
        numbers = request.numbers[rest]
        left = Request(**{**vars(request), "numbers": numbers, "x": request.x[rest]})
        self.world.check("nan", left, rows)

    async def _empty(self) -> None:
        request = self._request()
        none = Request(**{**vars(request), "numbers": request.numbers[:0], "x": request.x[:0]})
        await self._call("empty", self.world.clients, PLAIN, request=none)

    async def _blocking(self) -> None:
        request = self._request()
        layers, x = request.arguments(self.draw)
        client = self.draw.choice(self.world.blocking)
        output = None if request.y_dtype is None else request.y_dtype.text
        call = asyncio.to_thread(client.matmul, layers, x, output_dtype=output)
        code, answer = await self.world.ledger.end_of("blocking", call, PLAIN)
        if code == OK:
            self.world.check("blocking", request, answer)

    async def _raw(self) -> None:
        """Over generated stubs, as a client of another maker, who has a name."""
        request = self._request()
        stub: Any = pb_grpc.QuantizedLinearStub(self.draw.choice(self.world.channels))
        metadata = [("qlinear-client-id", f"client {self.draw.randrange(1000)}")]
        if self.draw.random() < 0.3:
            metadata.append(("qlinear-want-timing", "1"))
        call = stub.MatMul(request.message(), metadata=metadata)
        code, answer = await self.world.ledger.end_of("raw", call, PLAIN)
        if code == OK:
            self.world.check("raw", request, answer)

    async def _bad(self) -> None:
        """What breaks the contract is refused in the words of `refused_requests`."""
        channel = self.draw.choice(self.world.channels)
        if self.draw.random() < 0.1:
            garbage = b"\xff" + self.draw.randbytes(self.draw.randrange(200))
            call, expected = channel.unary_unary(f"{SERVICE}/MatMul")(garbage), "INVALID_ARGUMENT"
        else:
            message, code, _ = REFUSED[self.draw.choice(sorted(REFUSED))]
            stub: Any = pb_grpc.QuantizedLinearStub(channel)
            call, expected = stub.MatMul(message), code.name
        await self.world.ledger.end_of("bad", call, frozenset({expected}))

    async def _asking(self) -> None:
        stub: Any = pb_grpc.QuantizedLinearStub(self.draw.choice(self.world.channels))
        call = self.draw.choice(
            (
                lambda: stub.ListLayers(pb.ListLayersRequest()),
                lambda: stub.GetServerInfo(pb.GetServerInfoRequest()),
            )
        )
        await self.world.ledger.end_of("asking", call(), PLAIN)

    async def _hung_up(self) -> None:
        """A connection of its own, closed while its calls are out."""
        channel = grpc.aio.insecure_channel(self.world.target, options=CHANNEL)
        stub: Any = pb_grpc.QuantizedLinearStub(channel)
        requests = [self._request() for _ in range(self.draw.randint(1, 6))]
        ends = [
            asyncio.create_task(
                self.world.ledger.end_of("hung up", stub.MatMul(request.message()), LEFT)
            )
            for request in requests
        ]
        await asyncio.sleep(self.draw.uniform(0, LONGEST_TIMEOUT_SECONDS))
        await channel.close()
        for request, (code, answer) in zip(requests, await asyncio.gather(*ends), strict=True):
            if code == OK:
                self.world.check("hung up", request, answer)
