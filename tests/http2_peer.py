"""A client of HTTP/2, by hand, that sends unary calls and never lets an answer through.

It grants no window beyond the 64 KiB that a connection has at first, so that answers stay with the
server; statuses without an answer need none.
"""

import asyncio

SETTINGS, WINDOW_UPDATE, HEADERS, DATA = 4, 8, 1, 0
END_STREAM, END_HEADERS = 1, 4
FIRST_WINDOW_BYTES = 65_535
FRAME_BYTES = 16_384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int = 0, payload: bytes = b"", stream: int = 0) -> bytes:
    """Return a frame of a stream, or of the connection itself."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def header(name: str, value: str) -> bytes:
    """Return a header that is not indexed, as HPACK wants it."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class DeafPeer:
    """One connection. `refused` counts calls that ended without an answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._window = FIRST_WINDOW_BYTES
        self._room = asyncio.Event()
        self._streams = 0
        self.refused = 0
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, port: int) -> "DeafPeer":
        """Open a connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + frame(SETTINGS))
        return cls(reader, writer)

    async def call(self, path: str, message: bytes) -> None:
        """Send one unary call, as soon as the server has room for it."""
        stream = self._streams = 1 if not self._streams else self._streams + 2
        data = b"\0" + len(message).to_bytes(4, "big") + message
        while self._window < len(data):
            self._room.clear()
            await self._room.wait()
        self._window -= len(data)
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "server"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        block = b"".join(header(name, value) for name, value in fields.items())
        self._writer.write(frame(HEADERS, END_HEADERS, block, stream))
        pieces = [data[first : first + FRAME_BYTES] for first in range(0, len(data), FRAME_BYTES)]
        for number, piece in enumerate(pieces, start=1):
            self._writer.write(frame(DATA, number == len(pieces), piece, stream))
        await self._writer.drain()

    async def close(self) -> None:
        """Hang up."""
        self._reading.cancel()
        self._writer.transport.abort()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == WINDOW_UPDATE and stream == 0:
                self._window += int.from_bytes(payload, "big")
                self._room.set()
            elif kind == SETTINGS and not flags:
                self._writer.write(frame(SETTINGS, 1))
            elif kind == HEADERS and flags & END_STREAM:
                self.refused += 1
