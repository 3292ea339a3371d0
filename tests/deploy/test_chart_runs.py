"""What the chart starts, run for real on the loopback address: download, queries, server."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helm_chart import NAMESPACE, only, pod, render, server
from prometheus_tools import promtool
from serve_process import ENVIRONMENT
from source_tree import ROOT

from qlinear_service.kernels.build import default_cache_dir

MODEL = ROOT / "examples/models/all-MiniLM-L6-v2"
BODY = b"weights" * 1000
ADAPTER = ROOT / "deploy/helm/adapter-rules.yaml"


class Models(BaseHTTPRequestHandler):
    """Gives BODY to those who have the token, by a redirect as stores of models do."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.headers.get("Authorization") != "Bearer right":
            self.send_error(401)
        elif self.path == "/models/all.safetensors":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def store() -> Iterator[tuple[str, list[str]]]:
    """The address of a store of models, and the paths that it was asked for."""
    asked: list[str] = []
    handler = type("Handler", (Models,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}", asked
        httpd.shutdown()


def download(url: str, sha256: str, folder: Path, token: str) -> int:
    """Run the chart's init container as a process; return its exit code."""
    for name in ("sh", "curl", "sha256sum"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is missing")
    values = {"model": {"download": {"url": url, "sha256": sha256, "headerSecret": "token"}}}
    (deployment,) = [m for m in render(values) if m["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["initContainers"]
    header = folder.parent / "header"
    header.write_text(f"Authorization: Bearer {token}")
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environ.pop("FOLDER") == container["volumeMounts"][0]["mountPath"] == "/models"
    assert environ.pop("HEADER") == f"{container['volumeMounts'][1]['mountPath']}/header"
    environ |= {"FOLDER": str(folder), "HEADER": str(header), "PATH": os.environ["PATH"]}
    words = [*container["command"], *container["args"]]
    return subprocess.run(words, env=environ, capture_output=True, timeout=60).returncode


def test_the_download_leaves_a_model_only_if_its_bytes_are_right(
    store: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = store
    url, right = f"{address}/models/all.safetensors", hashlib.sha256(BODY).hexdigest()
    folder = tmp_path / "models"
    folder.mkdir()
    model = folder / "all.safetensors"
    assert download(url, right, folder, "wrong") != 0
    assert not model.exists()
    assert download(url, "0" * 64, folder, "right") != 0
    assert not model.exists()
    assert download(url, right, folder, "right") == 0
    assert model.read_bytes() == BODY
    assert [path.name for path in folder.iterdir()] == ["all.safetensors"]
    before = len(asked)
    assert download(url, right, folder, "right") == 0
    assert len(asked) == before, "a model that is there is not fetched again"


def test_the_server_is_told_where_the_download_lies() -> None:
    (container,) = pod("everything")["initContainers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert f"{environ['FOLDER']}/{environ['FILE']}" == server("everything")["args"][1]
    volumes = {volume["name"]: volume for volume in pod("everything")["volumes"]}
    assert volumes["header"]["secret"] == {"secretName": "token"}
    assert "emptyDir" in volumes["models"]


def series(pod_name: str, layer: str, values: str, service: str) -> dict[str, str]:
    labels = f'namespace="{NAMESPACE}",pod="{pod_name}",service="{service}",layer="{layer}"'
    return {"series": f"qlinear_queue_rows{{{labels}}}", "values": values}


def test_scalers_see_a_minutes_mean_of_all_layers(tmp_path: Path) -> None:
    """Two pods of this release and one of another: the KEDA query sums, the adapter's splits."""
    (trigger,) = only("keda", "ScaledObject")["spec"]["triggers"]
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    # As the adapter fills it in for the pods of an autoscaler.
    adapted = rule["metricsQuery"].replace("<<.Series>>", "qlinear_queue_rows")
    labels = f'namespace="{NAMESPACE}",pod=~"qlinear-a|qlinear-b"'
    adapted = adapted.replace("<<.LabelMatchers>>", labels).replace("<<.GroupBy>>", "pod")
    assert "<<" not in adapted
    own, others = "qlinear-metrics", "other-qlinear-metrics"
    checks: list[tuple[str, list[dict[str, Any]]]] = [
        (trigger["metadata"]["query"], [{"labels": "{}", "value": 235}]),
        (
            adapted,
            [
                {"labels": '{pod="qlinear-a"}', "value": 35},
                {"labels": '{pod="qlinear-b"}', "value": 200},
            ],
        ),
    ]
    case = {
        "interval": "30s",
        "input_series": [
            series("qlinear-a", "up", "0 10 50", own),  # 30 in the mean of the last two
            series("qlinear-a", "down", "5 5 5", own),
            series("qlinear-b", "up", "200 200 200", own),
            series("other", "up", "900 900 900", others),
        ],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "75s", "exp_samples": samples} for expr, samples in checks
        ],
    }
    path = tmp_path / "case.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "30s", "tests": [case]}))
    promtool("test", "rules", path)


def ask(channel: grpc.Channel, service: str) -> str:
    """What the kubelet's probe asks."""
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_container_of_the_chart_serves_answers_its_probes_and_leaves(tmp_path: Path) -> None:
    """The very words of the container; other are the address, free ports, folders and a delay."""
    container = server("cpu")
    changed = {
        "--host": "127.0.0.1",
        "--port": "0",
        "--metrics-port": "0",
        "--cache-dir": str(default_cache_dir()),
        "--drain-delay-seconds": "0",
    }
    words = []
    for word in container["args"]:
        flag, _, _ = word.partition("=")
        words.append(f"{flag}={changed.pop(flag)}" if flag in changed else word)
    assert not changed
    words[1] = str(MODEL)
    environ = ENVIRONMENT | {"HOME": str(tmp_path), "QLINEAR_CPU_THREADS": "1"}
    assert {entry["name"] for entry in container["env"]} <= environ.keys()
    command = [sys.executable, "-m", "qlinear_service", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(3)]
            assert said[2].startswith("ready on "), said
            with grpc.insecure_channel(said[2].split()[-1]) as channel:
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    assert ask(channel, container[probe]["grpc"]["service"]) == "SERVING"
            process.send_signal(signal.SIGTERM)
            assert process.wait(pod("cpu")["terminationGracePeriodSeconds"]) == 0
        finally:
            process.kill()
