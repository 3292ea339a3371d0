"""The compose file for real: a server and the Prometheus that watches it; Grafana is left out.

Changed are the images, which are built here, and the ports on this machine, which may be taken.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from image_tools import VERSION, answers_are_right, build_prometheus, free_port
from source_tree import ROOT

from qlinear_client import CallError, Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DEPLOY = ROOT / "deploy"
START_SECONDS = 120
PROGRAMS = {"docker": ["docker", "compose"], "podman": ["podman-compose"]}


class Composed:
    """What the compose file has started."""

    def __init__(self, engine: str, path: Path, ports: dict[int, int]) -> None:
        self._words = [*PROGRAMS[engine], "-p", f"qlinear-test-{os.getpid()}", "-f", str(path)]
        self._ports = ports

    def do(self, *words: str) -> str:
        """Run a command of compose and return what it says."""
        environment = os.environ | {"PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
        done = subprocess.run([*self._words, *words], capture_output=True, text=True,
                              env=environment)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def address(self, port: int) -> str:
        """Return where a port of the file is on this machine."""
        return f"127.0.0.1:{self._ports[port]}"

    def asked(self, query: str) -> list[str]:
        """Return the values that Prometheus knows for a query; none while it does not answer."""
        url = f"http://{self.address(9090)}/api/v1/query?{urlencode({'query': query})}"
        try:
            with urlopen(url, timeout=20) as got:
                return [one["value"][1] for one in json.load(got)["data"]["result"]]
        except (URLError, OSError):
            return []

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules that Prometheus evaluates."""
        with urlopen(f"http://{self.address(9090)}/api/v1/rules", timeout=20) as got:
            groups = json.load(got)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def composed(
    engine: str, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Composed]:
    """The file's server and Prometheus, started."""
    folder = tmp_path_factory.mktemp("compose")
    config = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services, ports = config["services"], {}
    del services["grafana"]
    services["qlinear"]["image"] = image
    del services["qlinear"]["build"]
    services["prometheus"]["image"] = build_prometheus(engine, folder)
    for service in services.values():
        inside = [int(port.rpartition(":")[2]) for port in service["ports"]]
        ports |= {port: free_port() for port in inside}
        service["ports"] = [f"127.0.0.1:{ports[port]}:{port}" for port in inside]
        service["volumes"] = [_from_here(mount) for mount in service["volumes"]]
    path = folder / "compose.yaml"
    path.write_text(yaml.safe_dump(config))
    running = Composed(engine, path, ports)
    try:
        running.do("up", "--detach")
        yield running
    finally:
        running.do("down", "--volumes")


def _from_here(mount: str) -> str:
    mount = mount.replace("${QLINEAR_MODELS:-../examples/models}", "../examples/models")
    return str(DEPLOY) + "/" + mount if mount.startswith(".") else mount


def _until(what: str, is_so: Any) -> None:
    end = time.monotonic() + START_SECONDS
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.5)


def _is_called(target: str) -> bool:
    try:
        with Client(target, timeout=5) as client:
            return client.server_info().version == VERSION
    except CallError:
        return False


def test_the_server_answers_and_is_watched(composed: Composed) -> None:
    target = composed.address(50051)
    _until("the server answers", lambda: _is_called(target))
    answers_are_right(target)
    _until("it is scraped", lambda: composed.asked('up{job="qlinear"}') == ["1"])
    answered = 'sum(qlinear_requests_total{code="OK",method=~"MatMul.*"})'
    _until("its calls are seen", lambda: [float(n) > 0 for n in composed.asked(answered)] == [True])
    rules = composed.rules()
    assert len(rules) > 20
    _until("rules are evaluated", lambda: {rule["health"] for rule in composed.rules()} == {"ok"})


def test_it_is_locked_down_and_keeps_what_it_has_measured(composed: Composed) -> None:
    _until("the server answers", lambda: _is_called(composed.address(50051)))

    def inside(command: str) -> str:
        return composed.do("exec", "-T", "qlinear", "sh", "-c", command)

    assert "10001" in inside("id -u")
    assert "Read-only file system" in inside("touch /opt/qlinear/new; true")
    assert ".json" in inside("ls /var/cache/qlinear/curves")
    assert "NoNewPrivs:\t1" in inside("cat /proc/self/status")
    assert "CapBnd:\t0000000000000000" in inside("cat /proc/self/status")


def test_it_ends_in_order(composed: Composed) -> None:
    composed.do("stop", "qlinear")
    assert '"event": "stopped", "engine_ended": true' in composed.do("logs", "qlinear")
