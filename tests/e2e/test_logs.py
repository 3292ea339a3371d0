"""The log of a server: one line for each event in both forms, whose call it was, and no data."""

import base64
import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from log_lines import split
from running_server import WAIT_SECONDS, K, Running, small_layers
from stream_peer import PATH, open_stream

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.config import ServerConfig
from qlinear_service.errors import ConfigError
from qlinear_service.log_values import FORMATS, event
from qlinear_service.packed_writer import write_packed

X = torch.ones(2, K).half()
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Log:
    """All that is logged, at any level, in one form."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.text = io.StringIO()
        self.handler = logging.StreamHandler(self.text)
        self.handler.setFormatter(FORMATS[form]())

    def lines(self, name: str = "") -> list[dict[str, object]]:
        """The lines of one event, or all, as keys and values."""
        read = json.loads if self.form == "json" else split
        found = [read(line) for line in self.text.getvalue().splitlines()]
        return [line for line in found if not name or line["event"] == name]


@pytest.fixture(params=["text", "json"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def log(form: str) -> AsyncIterator[Log]:
    log, root = Log(form), logging.getLogger()
    before = root.level
    root.addHandler(log.handler)
    root.setLevel(logging.DEBUG)
    yield log
    root.removeHandler(log.handler)
    root.setLevel(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "one.safetensors"
    layers = [layer for layer in small_layers() if layer.spec.model == "one"]
    write_packed(path, "one", layers, specs=[layer.spec for layer in layers])
    return path


@contextlib.contextmanager
def serving(models: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    quick = ["--port", "0", "--metrics-port", "-1", "--torch-only", "--drain-delay-seconds", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "qlinear_service", "serve", str(models), *quick, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_servers_life_has_one_line_for_each_event(models: Path, form: str) -> None:
    with serving(models, "--log-format", form) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready on "):
                break
        process.terminate()
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    read = json.loads if form == "json" else split
    lines = [read(line) for line in err.splitlines()]
    assert [line["event"] for line in lines] == [
        *("listening", "device", "kernels", "loaded", "self_test", "probe", "cost_curves"),
        *("ready", "signal", "draining", "stopped"),
    ]
    for line in lines:
        assert list(line)[:4] == ["time", "level", "logger", "event"]
        assert str(line["logger"]).startswith("qlinear_service.")
    by_event = {str(line["event"]): line for line in lines}
    assert by_event["listening"]["pid"] == (process.pid if form == "json" else str(process.pid))
    assert by_event["loaded"]["model"] == "one"
    assert float(str(by_event["ready"]["seconds"])) > 0
    assert by_event["ready"]["layers"] == (2 if form == "json" else "2")
    assert by_event["draining"]["calls"] == (0 if form == "json" else "0")
    assert by_event["stopped"]["engine_ended"] == (True if form == "json" else "true")


def test_there_are_two_forms() -> None:
    with pytest.raises(ConfigError, match=r"log_format: is 'xml'; expected text or json"):
        ServerConfig(log_format="xml")


def test_an_error_is_one_line_with_its_traceback(log: Log) -> None:
    logger = logging.getLogger("qlinear_service.test")
    try:
        raise ValueError('a text of\ntwo lines = "quoted"')
    except ValueError as error:
        event(logger, logging.ERROR, "broken", count=3, seconds=0.12345678, exc_info=error)
    logging.getLogger("somebody.else").warning("free text\nof %s", "others")
    mine, others = log.lines()
    plain = {"count": 3, "seconds": 0.123457} if log.form == "json" else {}
    assert mine | plain == mine
    assert (str(mine["count"]), str(mine["seconds"])) == ("3", "0.123457")
    assert "ValueError: a text of\ntwo lines" in str(mine["traceback"])
    assert (others["event"], others["level"]) == ("free text\nof others", "WARNING")
    assert log.text.getvalue().isascii()


async def test_refusals_and_failures_say_whose_call_it_was(running: Running, log: Log) -> None:
    metadata = (("x-request-id", "order 66"), ("traceparent", PARENT))
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.MatMul(running.request("nothing", X), timeout=20, metadata=metadata)
    (line,) = log.lines("call_refused")
    assert (line["request"], line["trace"], line["code"]) == ("order 66", TRACE, "NOT_FOUND")
    peer = open_stream(running, metadata=(("x-request-id", "session-1"),))
    await peer.send(5, "nothing", X, traceparent=PARENT)
    await peer.error(5)
    line = log.lines("call_refused")[-1]
    assert (line["request"], line["trace"]) == ("session-1#5", TRACE)
    # A failure: what the caller is told, the cause and the call are tied by the incident.
    await peer.send(6, "one/up", 13 * X)
    incident = (await peer.error(6)).message.rsplit(" ", 1)[-1]
    (cause,) = log.lines("request_failed")
    assert cause["incident"] == incident
    line = log.lines("call_refused")[-1]
    assert line["request"] == "session-1#6"
    assert incident in str(line["text"])
    # A caller that names nothing leaves nothing empty behind.
    await running.refused(running.request("nothing", X))
    assert "request" not in log.lines("call_refused")[-1]


async def test_an_id_is_data_of_a_stranger(running: Running, log: Log) -> None:
    metadata = (("x-request-id", 'a" level=ERROR event=fake ' + "x" * 5000),)
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.MatMul(running.request("nothing", X), timeout=20, metadata=metadata)
    (line,) = log.lines("call_refused")
    assert str(line["request"]).startswith('a" level=ERROR event=fake xxx')
    assert len(str(line["request"])) == 128
    assert line["level"] == "INFO"


SECRET = b"ZEBRAS"
"""Three float16 values whose bytes are text, so that they are found however they are shown."""


def secrets() -> torch.Tensor:
    x = torch.frombuffer(bytearray(SECRET * (K // 3)), dtype=torch.float16).clone()
    return x.repeat(2, 1)


def shown(text: str) -> list[str]:
    """The forms in which `text` shows the activations."""
    values = secrets()[0, :3].tolist()
    forms = [SECRET.decode(), SECRET.hex(), SECRET.hex(" "), str(list(SECRET))[1:-1]]
    forms += [base64.b64encode(SECRET).decode(), *(f"{value:.3f}"[:-1] for value in values)]
    return [form for form in forms if form.lower() in text.lower()]


async def test_no_line_ever_holds_activations(running: Running, log: Log) -> None:
    x, broken = secrets(), secrets()
    broken[0, 0] = 13  # on which these kernels fail
    (y,) = await running.matmul("up", x)
    await running.refused(running.request("nothing", x))
    await running.refused(running.request("one/up", x[:, : K - 3].contiguous()))
    await running.refused(running.request(["one/up", "two/wide"], x))
    await running.refused(running.request("one/up", broken))
    cut = running.request("one/up", x)
    cut.x.data = cut.x.data[:-1]
    await running.refused(cut)
    # What is no message, and what is one with activations in the wrong place.
    raw = running.channel.unary_unary("/qlinear.v1.QuantizedLinear/MatMul")
    whole = running.request("one/up", x).SerializeToString()
    for text in (whole[:-5], SECRET * 20, whole.replace(b"one/up", SECRET)):
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(text, timeout=WAIT_SECONDS)
    peer = open_stream(running)
    for number, (layer, rows) in enumerate([("one/up", x), ("nothing", x), ("one/up", broken)], 1):
        await peer.send(number, layer, rows)
        await peer.read()
    peer = open_stream(running)
    await peer.write(pb.StreamRequest(call=running.request("one/up", x)))
    await peer.ended()
    peer = running.channel.stream_stream(PATH)()
    await peer.write(SECRET * 20)
    assert await peer.code() is grpc.StatusCode.INVALID_ARGUMENT
    # Calls that fail together are tried one by one, with a line of their own.
    held = await running.hold("one/down")
    both = [
        running.stub.MatMul(running.request("one/up", one), timeout=WAIT_SECONDS)
        for one in (x, broken)
    ]
    await running.until_queued(4)
    running.kernels.gate.set()
    await held
    await both[0]
    with pytest.raises(grpc.aio.AioRpcError):
        await both[1]
    found = {str(line["event"]) for line in log.lines()}
    assert {"call_refused", "request_failed", "batch_failed"} <= found
    text = log.text.getvalue()
    # A name is a name, even one that looks like data: only where it is said to be one.
    text = text.replace("'ZEBRAS'", "")
    assert shown(text) == []
    assert shown(f"x {x}") != []
    assert shown(repr(x.view(torch.uint8).numpy().tobytes())) != []
    assert str(y[0, 0].item()) not in text
