"""`qlinear serve` as a process: its lines, its exits, and SIGTERM under load."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from running_server import K, assert_close, decode, small_layers

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_client import AsyncClient
from qlinear_service.kernels import reference
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed_writer import write_packed

WAIT_SECONDS = 60
QUICK = ("--port", "0", "--metrics-port", "-1", "--torch-only")
LAYERS = small_layers()
ENVIRONMENT = {name: v for name, v in os.environ.items() if not name.startswith("QLINEAR_")}


def qlinear(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "qlinear_service", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_SECONDS)
    return process.returncode, out, err


@dataclass
class Serving:
    process: subprocess.Popen[str]
    target: str

    def wait_ready(self) -> None:
        """Follow health until the server says SERVING."""
        with grpc.insecure_channel(self.target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service="readiness"), timeout=WAIT_SECONDS
            )
            for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    watch.cancel()
                    return


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two packed models."""
    folder = tmp_path_factory.mktemp("models")
    for model in ("one", "two"):
        layers = [layer for layer in LAYERS if layer.spec.model == model]
        specs = [layer.spec for layer in layers]
        write_packed(folder / f"{model}.safetensors", model, layers, specs=specs)
    return folder


Launch = Callable[..., Serving]


@pytest.fixture
def launch(models: Path) -> Iterator[Launch]:
    processes = []

    def start(*words: str) -> Serving:
        process = qlinear("serve", str(models), *QUICK, *words)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on 127.0.0.1:"), line
        serving = Serving(process, line.split()[-1])
        serving.wait_ready()
        return serving

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def message(name: str, x: torch.Tensor) -> pb.MatMulRequest:
    data = x.view(torch.uint8).numpy().tobytes()
    return pb.MatMulRequest(layer=name, x=pb.Tensor(dtype=1, shape=x.shape, data=data))


def truth(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    return reference.linear(layer, x)


def test_serves_a_folder_of_models_and_ends_well(launch: Launch) -> None:
    # The real kernels where there is a compiler, as for everybody who serves.
    serving = launch("--no-torch-only")
    with grpc.insecure_channel(serving.target) as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)
        assert list(stub.GetServerInfo(pb.GetServerInfoRequest()).models) == ["one", "two"]
        for layer in LAYERS:
            x = torch.randn(3, layer.spec.k).half()
            response = stub.MatMul(message(layer.spec.name, x), timeout=WAIT_SECONDS)
            assert_close(decode(response.y[0]), truth(layer, x))
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert "qlinear.v1.QuantizedLinear" in services
        assert "grpc.health.v1.Health" in services
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "startup", "readiness", "liveness", "qlinear.v1.QuantizedLinear"):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING, name
    serving.process.send_signal(signal.SIGTERM)
    code, out, err = finish(serving.process)
    assert (code, out) == (0, f"ready on {serving.target}\n")
    events = [line.split("event=")[1].split()[0] for line in err.splitlines()]
    assert events == [
        *("listening", "device", "kernels", "loaded", "loaded", "self_test", "probe"),
        *("cost_curves", "ready"),
        *("signal", "draining", "stopped"),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_nothing(launch: Launch, number: signal.Signals) -> None:
    serving = launch("--drain-delay-seconds", "0.2")
    layer = LAYERS[0]

    async def client(stub: Any) -> tuple[int, grpc.aio.AioRpcError]:
        for answered in range(1_000_000):
            x = torch.randn(2, K).half()
            try:
                response = await stub.MatMul(message(layer.spec.name, x))
            except grpc.aio.AioRpcError as error:
                return answered, error
            assert_close(decode(response.y[0]), truth(layer, x))
        raise AssertionError("the server never stopped")

    async def load() -> list[tuple[int, grpc.aio.AioRpcError]]:
        async with grpc.aio.insecure_channel(serving.target) as channel:
            stub = pb_grpc.QuantizedLinearStub(channel)
            clients = [asyncio.create_task(client(stub)) for _ in range(16)]
            # A first answer to somebody: from here on calls are in at every moment.
            await stub.MatMul(message(layer.spec.name, torch.zeros(1, K).half()))
            serving.process.send_signal(number)
            return await asyncio.gather(*clients)

    ends = asyncio.run(asyncio.wait_for(load(), WAIT_SECONDS))
    assert sum(answered for answered, _ in ends) > 16
    for _, error in ends:
        # Refused at the door, before it went in: safe to send elsewhere. Never cut off.
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.details() or "onnect" in error.details(), error.details()
    code, _, err = finish(serving.process)
    assert code == 0
    assert "level=ERROR" not in err


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_clients_of_two_servers_lose_nothing_when_one_ends(
    launch: Launch, number: signal.Signals, transport: str
) -> None:
    """Drained or killed: what was unanswered is replayed on the other one."""
    first, second = launch("--drain-delay-seconds", "0.2"), launch()
    target = f"ipv4:{first.target},{second.target}"
    layer = LAYERS[0]
    done = asyncio.Event()

    async def client(seed: int) -> int:
        draw = torch.Generator().manual_seed(seed)
        answered = 0
        async with AsyncClient(target, transport=transport, timeout=WAIT_SECONDS) as own:
            while not done.is_set():
                rows = [torch.randn(2, K, generator=draw).half() for _ in range(4)]
                results = await asyncio.gather(*(own.matmul(layer.spec.name, x) for x in rows))
                for x, y in zip(rows, results, strict=True):
                    assert_close(y, truth(layer, x))
                    answered += 1
        return answered

    async def load() -> list[int]:
        clients = [asyncio.create_task(client(seed)) for seed in range(8)]
        await asyncio.sleep(0.5)
        first.process.send_signal(number)
        code = await asyncio.to_thread(first.process.wait, WAIT_SECONDS)
        assert code == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        await asyncio.sleep(0.5)
        done.set()
        return await asyncio.gather(*clients)

    counts = asyncio.run(asyncio.wait_for(load(), WAIT_SECONDS))
    assert min(counts) > 0


def test_a_second_signal_ends_it_at_once(launch: Launch) -> None:
    serving = launch("--drain-delay-seconds", "3600")
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.stderr is not None
    for line in serving.process.stderr:
        if "event=draining" in line:
            break
    serving.process.send_signal(signal.SIGTERM)
    assert finish(serving.process)[0] == 128 + signal.SIGTERM


def test_a_damaged_model_is_one_line_and_exit_1(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    content = bytearray((models / "one.safetensors").read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    code, out, err = finish(qlinear("serve", str(path), *QUICK, "--log-level", "error"))
    assert code == 1
    assert out.startswith("listening on ")
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"qlinear serve: {path}")


def test_nothing_to_serve_is_one_line_and_exit_1(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        code, _, err = finish(qlinear("serve", str(path), *QUICK, "--log-level", "error"))
        assert code == 1
        assert len(err.splitlines()) == 1, err
        assert str(path) in err


def test_a_taken_port_is_one_line_and_exit_1(launch: Launch, models: Path) -> None:
    port = launch().target.rpartition(":")[2]
    code, out, err = finish(qlinear("serve", str(models), *QUICK, "--port", port))
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"qlinear serve: cannot listen on 127.0.0.1:{port}: the port is taken, or the host is none "
        "of this machine; choose others with --host and --port"
    ]


def test_print_config_shows_the_origin_of_each_value() -> None:
    code, out, err = finish(qlinear("serve", "x", "--port", "0", "--json"))
    assert (code, err) == (0, "")
    assert json.loads(out)["server"]["port"] == {"value": 0, "from": "flag --port"}
    code, out, err = finish(qlinear("serve", "x", "--print-config"))
    assert (code, err) == (0, "")
    assert "server.port" in out
