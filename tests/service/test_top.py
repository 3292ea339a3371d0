"""`qlinear top` against a metrics port: what it prints, and what it says where there is none."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from unittest.mock import patch

import pytest
from measured_layers import ROOFLINE, TELEMETRY, Spec, metrics_of
from rich.console import Console
from watched_metrics import HOSTILE, busy, crowd, port_of, traffic

from qlinear_service import cli
from qlinear_service.watch.fetch import Unreachable, base_url, fetch
from qlinear_service.watch.screen import gone, screen


@pytest.fixture
def port() -> Iterator[str]:
    specs = crowd(30, shapes=4, length=90)
    metrics = busy(specs)
    with port_of(metrics) as address:
        traffic(metrics, specs)
        yield address


def top(*words: str) -> int:
    return cli.main(["top", *words])


def drawn(document: dict[str, object], width: int, height: int | None) -> list[str]:
    """The lines of a terminal of that size."""
    console = Console(width=width, height=height or 100, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(screen(document, "http://x", width=width, height=height))
    return capture.get().splitlines()


def test_once_prints_state_answers_shapes_and_layers(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top("--url", port, "--once") == 0
    text = capsys.readouterr().out
    assert text.startswith("qlinear serving  cpu · 30 layers · 30 rows wait")
    for words in ("● Yes", "of what it can", "waiting 2 ms", "k8_n64_b4_gcol", "of floor"):
        assert words in text, words
    assert "model.layers.29" in text or "more layers" in text


def test_json_is_the_servers_document(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top("--url", f"http://{port}/", "--once", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    asked = fetch(f"http://{port}", 5)
    moving = ("uptime_seconds", "window_seconds")
    assert printed.keys() == asked.keys()
    assert printed["layers_total"] == 30
    assert printed["format"] == 1
    assert all(printed[name] <= asked[name] for name in moving)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal_nor_loses_a_column(port: str, width: int) -> None:
    document = fetch(f"http://{port}", 5)
    for shape in document["shapes"]:  # as long as they get
        shape |= {"shape": "k28672_n28672_b4_g128", "bytes_per_second": 4.56e12}
    lines = drawn(document, width, 40)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    (heading,) = [line for line in lines if line.startswith("shape")]
    assert heading.rstrip().endswith("bandwidth  of floor")
    (row, *_) = [line for line in lines if line.startswith("k28672_n28672_b4_g128")]
    assert "4.56 TB/s" in row
    assert "…" not in row
    names = [line for line in lines if line.startswith("m/")]
    assert names
    assert not any("… " in line for line in names), "their ends tell layers apart"


@pytest.mark.parametrize("height", [1, 10, 24, 60])
def test_a_screen_of_any_height_is_drawn(port: str, height: int) -> None:
    lines = drawn(fetch(f"http://{port}", 5), 80, height)
    assert any("● Yes" in line for line in lines)


def test_names_cannot_command_the_terminal() -> None:
    metrics = metrics_of(*(Spec(name, n=8) for name in HOSTILE), roofline=ROOFLINE)
    with port_of(metrics) as address:
        text = "\n".join(drawn(fetch(f"http://{address}", 5), 200, None))
    assert "\x1b]0" not in text
    assert "\x07" not in text
    assert "\x1b[31mred" not in text
    assert "?[31mred" in text
    assert "[bold]markup[/bold]" in text
    assert "\u202e" not in text


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every field of a document; of a list, its first item."""
    fields = value.items() if isinstance(value, dict) else [(0, value[0])] if value else []
    for key, one in fields:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


@pytest.mark.parametrize("wrong", [None, -1, "\x1b]0;hacked\x07[bold]", [], {}, 1e300, "gone"])
def test_a_document_of_something_else_is_drawn_or_one_sentence(port: str, wrong: object) -> None:
    document = fetch(f"http://{port}", 5)
    refused = 0
    for path in places(document):
        damaged = json.loads(json.dumps(document))
        place = damaged
        for step in path[:-1]:
            place = place[step]
        if wrong == "gone":
            del place[path[-1]]
        else:
            place[path[-1]] = wrong
        try:
            text = "\n".join(drawn(damaged, 200, None))
        except Unreachable:
            refused += 1
        else:
            assert "\x1b]0" not in text, path
    assert refused > 0 or wrong in (-1, 1e300)


@pytest.mark.parametrize("width", [1, 2, 20, 29, 30, 31, 50])
def test_a_narrow_terminal_is_drawn(port: str, width: int) -> None:
    metrics = busy(crowd(3, shapes=1))
    with port_of(metrics) as address:
        document = fetch(f"http://{address}", 5)
    document["trend"] = {name: [1.0] * 150 for name in document["trend"]}
    lines = drawn(document, width, 24)
    assert max(map(len, lines)) <= width


def test_gauges_of_a_gpu_stand_in_the_first_line() -> None:
    clock, power = ("qlinear_gpu_clock_hertz",), ("qlinear_gpu_power_watts",)
    told = TELEMETRY | {clock: 1.98e9, power: 650.0}
    with port_of(metrics_of(Spec("up", n=8), telemetry=told)) as address:
        first, *_ = drawn(fetch(f"http://{address}", 5), 100, None)
    assert "1.98 GHz · 650 W · 1 °C" in first


def test_a_server_that_is_lost_is_said_first_and_shown_as_it_was(port: str) -> None:
    lost = gone(fetch(f"http://{port}", 5), "no server answers at http://x", 12.0)
    text = "\n".join(drawn(lost, 100, None))
    assert text.startswith("qlinear unreachable")
    assert "✖ No answer for 12 s  no server answers" in text
    assert "k8_n64_b4_gcol" in text


def test_no_server_is_one_sentence_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    with port_of(metrics_of()) as address:
        pass  # a port that was free a moment ago
    assert top("--url", address, "--once") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        f"qlinear top: no server answers at http://{address}: Connection refused; is it running"
    )
    assert err.count("\n") == 1


def test_a_port_that_does_not_speak_http_is_one_sentence_without_its_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\x00\x18\x04\x00\x00 settings of HTTP/2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unreachable, match=r": what is there does not speak HTTP/1; is it run"):
            fetch(f"http://127.0.0.1:{other.getsockname()[1]}", 5)
        thread.join()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>hello</html>", "is no qlinear server"),
        (b"[1,2]", "is no qlinear server"),
        (b'{"format":99}', "speaks format 99"),
        (b'{"format":1}', "cannot read"),
        (b"[" * 100_000, "is no qlinear server"),
        (None, "answers 404"),
    ],
)
def test_something_else_that_answers_is_one_sentence(
    body: bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        assert top("--url", f"127.0.0.1:{server.server_port}", "--once") == 1
        server.shutdown()
        thread.join()
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["", "http://", "ftp://x:1", "x:port", "x:0", "http://[::1"])
def test_what_is_no_address_is_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top("--url", url, "--once") == 1
    assert f"--url is {url!r}; expected" in capsys.readouterr().err


def test_addresses_may_be_those_of_the_page_and_of_metrics() -> None:
    for url in ("h:1", "http://h:1", "http://h:1/", "http://h:1/metrics", "h:1/now.json"):
        assert base_url(url) == "http://h:1"
    assert base_url("https://h/prefix/metrics") == "https://h/prefix"
    assert base_url("[::1]:9464") == "http://[::1]:9464"


def test_other_wrong_uses_are_one_sentence(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top("--url", port, "--interval", "0") == 1
    assert "--interval is 0; expected 0.1 to 3600" in capsys.readouterr().err
    assert top("--url", port) == 1  # not into a file for ever
    assert "use --once, or --json" in capsys.readouterr().err


def test_a_proxy_of_the_environment_is_not_asked(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fetch(f"http://{port}", 5)["state"] == "serving"


def test_json_goes_on_until_it_is_stopped(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    naps = iter([None, None])

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if next(naps, "end") == "end":
            raise KeyboardInterrupt

    with patch("qlinear_service.commands.top.time.sleep", sleep):
        assert top("--url", port, "--json", "--interval", "0.5") == 130
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["format"] for line in lines] == [1, 1, 1]
