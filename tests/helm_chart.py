"""The Helm chart as the tests see it: rendered by Helm itself, with several sets of values.

Without Helm, tests that import this are skipped, or fail in CI, which must not skip in silence.
"""

import argparse
import copy
import os
from functools import cache
from typing import Any

import pytest
import yaml
from source_tree import ROOT

from qlinear_service.commands import serve
from qlinear_service.config import ServiceConfig
from qlinear_service.config_sources import flag_values, resolve

try:
    import helm_python.chart as helm
except ImportError:
    HOW = "Helm is missing: make chart"
    if os.environ.get("CI_REQUIRE_CHART") == "1":
        pytest.fail(f"CI must not skip this: {HOW}", pytrace=False)
    pytest.skip(HOW, allow_module_level=True)

CHART = ROOT / "deploy/helm/qlinear"
CLAIM = {"volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}
DOWNLOAD = {
    "download": {
        "url": "https://models.example:8443/some%20where/all.safetensors?version=2",
        "sha256": "ab" * 32,
        "headerSecret": "token",
    }
}
EVERYTHING: dict[str, Any] = {
    "fullnameOverride": "matrices",
    "image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": [{"name": "registry"}]},
    "model": DOWNLOAD,
    "server": {
        "host": "::",
        "maxQueueBytes": 2 << 30,
        "traceEndpoint": "http://collector.monitoring:4317",
        "options": {
            "max_batch_rows": 2000000,
            "max_queue_age": 2.5,
            "batch_invariant": True,
            "reflection": False,
            "log_format": "json",
        },
    },
    "gpu": {"resource": "nvidia.com/mig-1g.10gb", "runtimeClassName": "nvidia"},
    "monitoring": {"serviceMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
    "podAnnotations": {"note": "1"},
    "podLabels": {"team": "a"},
    "nodeSelector": {"gpu": "a100"},
    "tolerations": [{"key": "batch", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {"model": CLAIM},
    "cpu": {
        "model": {**CLAIM, "path": "one.safetensors"},
        "gpu": {"enabled": False},
        "resources": {"limits": {"cpu": "3500m"}},
        "cache": {"volume": {"persistentVolumeClaim": {"claimName": "cache"}}},
    },
    "hpa": {"model": CLAIM, "autoscaling": {"kind": "hpa"}},
    "keda": {"model": CLAIM, "autoscaling": {"kind": "keda", "queueRows": 64}},
    "everything": EVERYTHING,
    "gpus": {"model": CLAIM, "gpu": {"count": 4, "mode": "replicate"}},
    "nothing": {
        "model": CLAIM,
        "drain": {"preStopSeconds": 0, "delaySeconds": 0, "graceSeconds": 0},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
}
"""Sets of values by name; between them they reach every branch of the templates."""

NAMESPACE = "models"


def render(values: dict[str, Any], release: str = "qlinear") -> list[dict[str, Any]]:
    """Return the manifests of `values`, as Helm would send them to a cluster.

    Raises:
        helm_python.errors.HelmError: Helm refuses the values or a template.
    """
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name=release, namespace=NAMESPACE)
    return [
        manifest
        for path, text in texts.items()
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest is not None
    ]


@cache
def _rendered(name: str) -> list[dict[str, Any]]:
    return render(VALUES[name])


def manifests(name: str) -> list[dict[str, Any]]:
    """Return the manifests of a set of `VALUES`."""
    return copy.deepcopy(_rendered(name))


def only(name: str, kind: str) -> dict[str, Any]:
    """Return the one manifest of a kind in a set of `VALUES`."""
    (found,) = [manifest for manifest in manifests(name) if manifest["kind"] == kind]
    return found


def services(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Service of calls and that of metrics."""
    calls, metrics = [m for m in manifests(name) if m["kind"] == "Service"]
    return calls, metrics


def pod(name: str) -> dict[str, Any]:
    """Return the pod that the Deployment makes."""
    spec: dict[str, Any] = only(name, "Deployment")["spec"]["template"]["spec"]
    return spec


def server(name: str) -> dict[str, Any]:
    """Return the container of the server."""
    (container,) = pod(name)["containers"]
    return dict(container)


def configuration(name: str) -> tuple[str, ServiceConfig]:
    """Return the path and the configuration that `qlinear serve` makes of the container."""
    container = server(name)
    assert container["command"] == ["qlinear"]
    verb, *words = container["args"]
    assert verb == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    args = parser.parse_args(words)
    # A value from the cluster is a number there: 4 stands for it.
    environ = {entry["name"]: entry.get("value", "4") for entry in container["env"]}
    return args.path, resolve(flags=flag_values(args), environ=environ).config
