"""What goes wrong around the calls: connections that are cut, client processes that are killed."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

HERE = Path(__file__).parent
CHUNK_BYTES = 1 << 16


class Cutter:
    """Passes bytes on between clients and the server, and cuts connections without a word.

    Args:
        target: address of the server.
        seed: of the instants.
    """

    def __init__(self, target: str, seed: int) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._draw = random.Random(f"cutter {seed}")
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.cuts = 0

    async def start(self) -> str:
        """Listen on a free port; return its address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def run(self) -> None:
        """Cut a connection now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._draw.uniform(0.05, 0.6))
            if self._writers:
                self._cut(self._draw.choice(sorted(self._writers, key=id)))
                self.cuts += 1

    async def stop(self) -> None:
        """Cut all and listen no more."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            self._cut(writer)
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, onward[1]), (onward[0], writer)):
            self._writers.add(sink)
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await source.read(CHUNK_BYTES):
                sink.write(data)
                await sink.drain()
        self._cut(sink)

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()


class Victims:
    """Client processes that are killed in the middle of their calls, one after the other.

    Args:
        target: address of the server.
        seed: of the instants.
    """

    def __init__(self, target: str, seed: int) -> None:
        self._target = target
        self._draw = random.Random(f"victims {seed}")
        self.killed = 0

    async def run(self) -> None:
        """Start one, let it call, kill it; until cancelled."""
        while True:
            transport = self._draw.choice(("stream", "unary"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(HERE / "victim.py"), self._target, transport),
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                assert process.stdout is not None
                await process.stdout.readline()  # it calls
                await asyncio.sleep(self._draw.uniform(0.0, 0.3))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                await process.wait()
            self.killed += 1
            await asyncio.sleep(self._draw.uniform(1.0, 6.0))
