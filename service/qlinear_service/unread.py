"""Large answers of unary calls that gRPC could not send yet, as their client does not read.

Such an answer is in no slot of the slab any more, and gRPC keeps as many as a connection has calls.
For a stream `max_stream_bytes` stops the reading; a unary call is there already and is refused.
Event loop only; knows no grpc.
"""

import asyncio
from collections import defaultdict

from qlinear_service.errors import Overloaded

__all__ = ["COUNTED_BYTES", "UnreadAnswers"]

COUNTED_BYTES = 64 * 1024
"""Smaller answers are not counted: a connection has at most 1024 calls, so 64 MiB of them."""

RETRY_AFTER_SECONDS = 0.1


class UnreadAnswers:
    """How many bytes of answers each connection has not read.

    Args:
        most_bytes: of one connection, beyond which its calls for large answers are refused.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes: defaultdict[str, int] = defaultdict(int)  # by connection, none that is 0

    def check(self, connection: str, response_bytes: int) -> None:
        """Raise Overloaded if the answer to a call would be too much for its connection.

        Args:
            connection: whatever names it.
            response_bytes: of the answer; one always fits.
        """
        unread = self._bytes.get(connection, 0)
        if unread and unread + response_bytes > self._most_bytes:
            raise Overloaded(
                f"this connection has {unread} bytes of answers that it has not read, and this one "
                f"would have {response_bytes}; at most {self._most_bytes} may wait "
                "(--max-stream-bytes): read them, and send the call again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                reason="unread_bytes",
            )

    def hold(self, connection: str, response_bytes: int) -> None:
        """Count an answer until the current task ends, which is when gRPC has sent it."""
        task = asyncio.current_task()
        assert task is not None, "gRPC runs methods in tasks"
        self._bytes[connection] += response_bytes
        task.add_done_callback(lambda _: self._let_go(connection, response_bytes))

    def _let_go(self, connection: str, response_bytes: int) -> None:
        self._bytes[connection] -= response_bytes
        if not self._bytes[connection]:
            del self._bytes[connection]
