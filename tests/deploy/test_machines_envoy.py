"""Envoy before replicas, for real: the shipped configuration loses no call and no caller's name.

What names and servers do is what they do in test_machines_dns.py.
"""

import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from chaos.truth import Truth, numbers_from
from envoy_tools import CONFIG, ENVOY, Envoy, parts, running_envoy, shipped
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from name_server import Names
from replica_load import Load, calling, under_load
from replicas import Replica, come_restart_and_die, start_two

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_client import Client
from qlinear_service.callers import CLIENT_KEY
from qlinear_service.config import ServerConfig
from qlinear_service.dtypes import DType
from qlinear_service.health import TRAFFIC_NAMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FOUND_SECONDS = 25.0


def test_envoy_takes_the_configuration_as_it_is_shipped() -> None:
    done = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", CONFIG], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "][warning][" not in done.stderr  # of what later releases will refuse


def test_envoy_understands_the_command_line_of_its_manifest() -> None:
    deployment, *_ = yaml.safe_load_all((CONFIG.parent / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["envoy"]
    (mount, _) = container["volumeMounts"]
    args = [word.replace(mount["mountPath"], str(CONFIG.parent)) for word in container["args"]]
    words = [ENVOY, *args, "--mode", "validate"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(CONFIG) in args


def test_it_fits_the_servers_that_it_stands_before() -> None:
    _, connections, cluster = parts(shipped())
    (check,) = cluster["health_checks"]
    assert check["grpc_health_check"]["service_name"] in TRAFFIC_NAMES
    # The chart's servers show NOT_SERVING for 5 s before they refuse calls.
    assert float(check["interval"].removesuffix("s")) < 5
    lives = connections["common_http_protocol_options"]["max_connection_duration"]
    assert float(lives.removesuffix("s")) == ServerConfig().max_connection_seconds
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    port = endpoint["endpoint"]["address"]["socket_address"]["port_value"]
    assert port == ServerConfig().port


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_no_call_is_lost_when_replicas_come_restart_and_die(
    names: Names, three: list[Replica], truth: Truth, tmp_path: Path, transport: str
) -> None:
    start_two(names, three)
    with (
        before(names, three, 2, tmp_path) as envoy,
        under_load(truth, envoy.target, transport) as load,
    ):
        come_restart_and_die(names, three, FOUND_SECONDS)
    assert load.problems == []
    assert load.answered > 100


def test_callers_that_never_try_again_lose_nothing_either(
    names: Names, three: list[Replica], truth: Truth, tmp_path: Path
) -> None:
    """Any gRPC client, without a policy of its own: Envoy sends a lost call to another replica."""
    start_two(names, three)
    with before(names, three, 2, tmp_path) as envoy:
        load = Load(truth)

        def plain(seed: int) -> None:
            with grpc.insecure_channel(envoy.target) as channel:
                load.blocking(lambda layer, x: _matmul(channel, layer, x), seed)

        callers = [threading.Thread(target=plain, args=(seed,)) for seed in range(8)]
        with calling(load, callers):
            come_restart_and_die(names, three, FOUND_SECONDS)
        assert load.problems == []
        assert envoy.counters()["cluster.replicas.upstream_rq_retry_success"] > 0


def test_calls_larger_than_its_buffer_get_through(
    names: Names, three: list[Replica], truth: Truth, tmp_path: Path
) -> None:
    three[0].start()
    names.show(three[0].host)
    numbers = numbers_from(0, 65536)
    x = truth.rows("one/up", DType.F16, numbers)
    assert x.nbytes == 12 << 20
    with before(names, three, 1, tmp_path) as envoy, Client(envoy.target, timeout=60) as client:
        y = client.matmul("one/up", x)
    assert not truth.problem("one/up", DType.F16, y, numbers, same_bits=False)


def test_callers_keep_their_names_or_get_their_addresses(names: Names, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Noting(pb_grpc.QuantizedLinearServicer):
        def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
            seen.append(dict(context.invocation_metadata()))
            return pb.GetServerInfoResponse()

    ready = health.HealthServicer()
    ready.set("readiness", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_QuantizedLinearServicer_to_server(Noting(), server)
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    port = server.add_insecure_port("127.0.0.2:0")
    server.start()
    names.show("127.0.0.2")
    try:
        with running_envoy(tmp_path, names.port, port) as envoy:
            until(lambda: envoy.healthy() == {f"127.0.0.2:{port}"})
            with grpc.insecure_channel(envoy.target) as channel:
                stub = pb_grpc.QuantizedLinearStub(channel)
                stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
                named = ((CLIENT_KEY, "tenant"),)
                stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20, metadata=named)
    finally:
        server.stop(None)
    assert [one[CLIENT_KEY] for one in seen] == ["127.0.0.1", "tenant"]


@contextmanager
def before(names: Names, three: list[Replica], healthy: int, folder: Path) -> Iterator[Envoy]:
    """Run Envoy before servers that run, and wait until it knows so many of them to be ready."""
    with running_envoy(folder, names.port, three[0].port) as envoy:
        until(lambda: len(envoy.healthy()) == healthy)
        yield envoy


def until(is_so: Any) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def _matmul(channel: grpc.Channel, layer: str, x: Any) -> Any:
    tensor = pb.Tensor(dtype=pb.DTYPE_F16, shape=x.shape, data=x.tobytes())
    request = pb.MatMulRequest(layer=layer, x=tensor)
    (y,) = pb_grpc.QuantizedLinearStub(channel).MatMul(request, timeout=30).y
    return np.frombuffer(y.data, np.float16).reshape(y.shape)
