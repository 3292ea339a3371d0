"""qlinear doctor --health: what a container's probe sees, and how little it imports."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from qlinear_service import cli

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server that lives and does not want calls."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("liveness", SERVING)
    servicer.set("", NOT_SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


def test_a_healthy_server_is_0_and_an_unwilling_one_1(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{port}"
    asked = ["doctor", "--health", "--target", target]
    assert cli.main([*asked, "--service", "liveness"]) == 0
    assert capsys.readouterr() == (f"{target}: SERVING\n", "")
    assert cli.main(asked) == 1
    assert capsys.readouterr() == ("", f"{target}: NOT_SERVING\n")
    assert cli.main([*asked, "--json"]) == 1
    wanted = f'{{"target": "{target}", "service": "", "status": "NOT_SERVING"}}\n'
    assert capsys.readouterr().out == wanted


def test_a_health_that_is_not_there_and_a_server_that_is_not_there_are_1(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["doctor", "--health", "--target"]
    assert cli.main([*asked, f"127.0.0.1:{port}", "--service", "livenes"]) == 1
    assert capsys.readouterr().err == (
        f"qlinear doctor: 127.0.0.1:{port}: NOT_FOUND: the server has no health called 'livenes'; "
        "expected liveness, startup or readiness\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    assert cli.main([*asked, f"127.0.0.1:{closed}"]) == 1
    address = f"127.0.0.1:{closed}"
    assert capsys.readouterr().err == (
        f"qlinear doctor: {address}: UNAVAILABLE: no server answers at {address}: Connection "
        "refused (111); is it running, and is this its port (--port, 50051 by default)?\n"
    )


@pytest.mark.parametrize("target", ["127.0.0.1", "127.0.0.1:99999", "http://127.0.0.1:50051"])
def test_an_address_that_cannot_be_one_is_told_as_such(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--health", "--target", target, "--timeout", "2"]) == 1
    said = f'qlinear doctor: target is {target!r}; expected "host:port", as in 127.0.0.1:50051\n'
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_wait_must_have_an_end(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--health", "--target", "127.0.0.1:1", "--timeout", seconds]) == 1
    said = f"qlinear doctor: --timeout is {seconds}; expected seconds above 0, 3600 at most\n"
    assert capsys.readouterr().err == said


def test_a_server_of_something_else_has_no_health(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert cli.main(["doctor", "--health", "--target", f"127.0.0.1:{port}"]) == 1
    server.stop(0).wait()
    assert capsys.readouterr().err == (
        f"qlinear doctor: 127.0.0.1:{port}: UNIMPLEMENTED: what answers there has no health; "
        "is it a qlinear server?\n"
    )


def test_a_server_that_does_not_answer_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        words = ["doctor", "--health", "--target", target, "--timeout", "0.3"]
        assert cli.main(words) == 1
    assert capsys.readouterr().err == (
        f"qlinear doctor: {target}: DEADLINE_EXCEEDED: no answer came before the deadline; is a "
        "server there, or too busy for it?\n"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_without_a_target_it_is_the_configured_server(
    port: int,
    host: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QLINEAR_HOST", host)
    monkeypatch.setenv("QLINEAR_PORT", str(port))
    # A proxy of the environment is not asked.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert cli.main(["doctor", "--health", "--service", "liveness"]) == 0
    assert capsys.readouterr().out == f"127.0.0.1:{port}: SERVING\n"
    monkeypatch.setenv("QLINEAR_PORT", "0")
    assert cli.main(["doctor", "--health"]) == 1
    assert "--target" in capsys.readouterr().err


def test_it_imports_nothing_heavy(port: int) -> None:
    program = (
        "import sys\n"
        "from qlinear_service.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'rich', 'qlinear_client'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else code)\n"
    )
    words = ["doctor", "--health", "--target", f"127.0.0.1:{port}", "--service", "liveness"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
