"""Streams of the chaos suite that no client of ours makes: slow, rude, or left in the middle."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import grpc
from chaos.callers import LEFT, PLAIN, World
from chaos.ledger import LOST_SECONDS, OK
from chaos.requests import Request, draw_request, poison
from refused_requests import REFUSED

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc

MOST_CALLS = 24
CODES = {code.value[0]: code.name for code in grpc.StatusCode}
BROKEN = "Internal error from Core"
"""What grpc.aio says, as INTERNAL, of a write that failed before the status had arrived."""

WAYS = ("good", "taking back", "slow", "rude", "leaving")


@dataclass
class Sent:
    """One call without an answer."""

    request: Request | None
    allowed: set[str]
    began: float


@dataclass
class RawStream:
    """One stream and what is unanswered on it; use it once.

    Args:
        world: shared by all.
        draw: decides everything.
    """

    world: World
    draw: random.Random
    unanswered: dict[int, Sent] = field(default_factory=dict)
    going_away: bool = False

    async def run(self) -> int:
        """Return how many calls were sent on it."""
        way, calls = self.draw.choice(WAYS), self.draw.randint(1, MOST_CALLS)
        stub: Any = pb_grpc.QuantizedLinearStub(self.draw.choice(self.world.channels))
        stream, sent = stub.MatMulStream(), 0
        try:
            async with asyncio.timeout(LOST_SECONDS):
                for number in range(1, calls + 1):
                    sent = number
                    await self._send(stream, number, way)
                await self._end(stream, way)
                while (response := await stream.read()) is not grpc.aio.EOF:
                    self._take(response)
            code = await stream.code()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            code = await stream.code()  # a write on a stream that has ended fails in other words
            if await stream.details() == BROKEN:
                code = grpc.StatusCode.UNAVAILABLE
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
        except TimeoutError:
            stream.cancel()
            code = None
        self._close("lost" if code is None else code.name, await stream.details() or "", way)
        return sent

    async def _send(self, stream: Any, number: int, way: str) -> None:
        call, loop = StreamCall.drawn(self.draw, self.world), asyncio.get_running_loop()
        self.world.ledger.begin()
        self.unanswered[number] = Sent(call.request, set(call.allowed), loop.time())
        await stream.write(pb.StreamRequest(request_id=number, call=call.message, **call.more))
        if way == "taking back" and self.draw.random() < 0.5:
            taken = self.draw.randint(1, number)
            if taken in self.unanswered:
                self.unanswered[taken].allowed.add("CANCELLED")
            await stream.write(pb.StreamRequest(request_id=taken, cancel=pb.Cancel()))

    async def _end(self, stream: Any, way: str) -> None:
        if way == "rude":
            await stream.write(pb.StreamRequest(request_id=0, cancel=pb.Cancel()))
        elif way == "leaving":
            await asyncio.sleep(self.draw.uniform(0, 0.02))
            stream.cancel()
        elif way == "slow":
            await asyncio.sleep(self.draw.uniform(0, 0.5))
        if way != "leaving":
            await stream.done_writing()

    def _take(self, response: pb.StreamResponse) -> None:
        outcome = response.WhichOneof("outcome")
        if outcome == "going_away":
            self.going_away = True
            return
        sent = self.unanswered.pop(response.request_id, None)
        if sent is None:
            self.world.ledger.problem(f"stream: id {response.request_id} has a second answer")
            return
        code, text, pause = OK, "", None
        if outcome == "error":
            code = CODES.get(response.error.code, "UNKNOWN")
            text, pause = response.error.message, response.error.retry_after_nanoseconds / 1e9
        self.world.ledger.end("stream", code, text, sent.allowed, began=sent.began, pause=pause)
        if code == OK and sent.request is not None:
            self.world.check("stream", sent.request, response.result)

    def _close(self, code: str, details: str, way: str) -> None:
        """Give what is unanswered the status of the stream."""
        allowed = {"rude": {"INVALID_ARGUMENT"}, "leaving": set(LEFT)}.get(way, set())
        if code == OK and self.going_away:
            code = "UNAVAILABLE"  # never read: to be sent on another stream
        elif code == OK:
            code = "lost"
        for sent in self.unanswered.values():
            text = f"the stream ({way}) has ended without an answer: {details}"
            self.world.ledger.end("stream", code, text, allowed, began=sent.began)


@dataclass(frozen=True)
class StreamCall:
    """One message, and what may become of it."""

    message: pb.MatMulRequest
    request: Request | None
    """What its answer is to be compared with."""
    allowed: frozenset[str]
    more: dict[str, Any]

    @classmethod
    def drawn(cls, draw: random.Random, world: World) -> "StreamCall":
        """Return one of any kind."""
        kind = draw.choices(("plain", "hasty", "bad", "poison"), (20, 3, 2, 1))[0]
        if kind == "bad":
            message, code, _ = REFUSED[draw.choice(sorted(REFUSED))]
            return cls(message, None, frozenset({code.name}), {})
        request = draw_request(draw, world.truth)
        more: dict[str, Any] = {"want_timing": True} if draw.random() < 0.3 else {}
        if kind == "poison":
            poison(request, draw)
            return cls(request.message(), None, frozenset({"INTERNAL"}), more)
        if kind == "hasty":
            more["timeout_nanoseconds"] = draw.randint(1, 200_000_000)
            return cls(request.message(), request, PLAIN | {"DEADLINE_EXCEEDED"}, more)
        return cls(request.message(), request, PLAIN, more)
