"""The memory of a real server process: malloc as it was pinned, and no growth over many calls."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from running_server import K, small_layers

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service.packed_writer import write_packed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they read /proc")

WAIT_SECONDS = 60
# The choices of whoever runs the tests count more than the server's own.
ENVIRONMENT = {
    name: word for name, word in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
}


@dataclass
class Serving:
    """A server process."""

    pid: int
    target: str

    def minor_faults(self) -> int:
        """Pages that the kernel has had to hand to the process so far."""
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[7])

    def anonymous_bytes(self) -> int:
        """Resident memory that no file backs."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    layers = [layer for layer in small_layers() if layer.spec.model == "one"]
    model = tmp_path / "one.safetensors"
    write_packed(model, "one", layers, specs=[layer.spec for layer in layers])
    ports = ["--port", "0", "--metrics-port", "-1", "--drain-delay-seconds", "0"]
    command = [sys.executable, "-m", "qlinear_service", "serve", str(model), "--torch-only", *ports]
    with ExitStack() as stack:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        stack.enter_context(process)
        stack.callback(process.send_signal, signal.SIGTERM)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[1].startswith("ready on ")
        yield Serving(process.pid, lines[1].split()[-1])


def request(rows: int) -> pb.MatMulRequest:
    x = pb.Tensor(dtype=pb.DTYPE_F16, shape=[rows, K], data=bytes(rows * K * 2))
    return pb.MatMulRequest(layer="up", x=x)


def test_large_messages_cost_no_new_pages(serving: Serving) -> None:
    """By default malloc returns freed megabytes to the kernel, and has to be given them anew."""
    large = request((2 << 20) // (K * 2))
    with grpc.insecure_channel(serving.target) as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)
        for _ in range(30):
            stub.MatMul(large, timeout=WAIT_SECONDS)
        before = serving.minor_faults()
        for _ in range(50):
            stub.MatMul(large, timeout=WAIT_SECONDS)
    faults_per_call = (serving.minor_faults() - before) / 50
    # 0.2 as it is, 33 with malloc's own thresholds that adapt, 2700 with fixed ones. A single new
    # buffer of 2 MiB, where a busy machine frees one late, is 10 of these.
    assert faults_per_call < 16


async def test_memory_does_not_grow_with_calls(serving: Serving) -> None:
    """Unary and streamed. `qlinear bench soak` holds 200,000 calls to 2 %."""
    async with grpc.aio.insecure_channel(serving.target) as channel:
        stub: Any = pb_grpc.QuantizedLinearStub(channel)

        async def block(number: int) -> None:
            if number % 2:
                for _ in range(20):
                    await asyncio.gather(*(stub.MatMul(request(n % 7 + 1)) for n in range(50)))
                return
            stream = stub.MatMulStream()
            for number in range(1, 1001):
                await stream.write(
                    pb.StreamRequest(request_id=number, call=request(number % 7 + 1))
                )
            for _ in range(1000):
                assert (await stream.read()).WhichOneof("outcome") == "result"
            await stream.done_writing()

        for number in range(4):
            await block(number)
        before = serving.anonymous_bytes()
        for number in range(8):
            await block(number)
        # A leak of one message of a call would be 8000 times 1 KiB or more.
        assert serving.anonymous_bytes() - before < 4 << 20
