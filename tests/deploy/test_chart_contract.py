"""What the chart says of the server exists in the server: flags, ports, metrics, health names."""

import json
import tomllib
from typing import Any

import pytest
import yaml
from helm_chart import (
    CHART,
    NAMESPACE,
    VALUES,
    configuration,
    manifests,
    only,
    pod,
    render,
    server,
    services,
)
from prometheus_tools import metrics_of, rules
from source_tree import ROOT

from qlinear_service import health
from qlinear_service import server as life
from qlinear_service.config import ServerConfig
from qlinear_service.config_sources import ENVIRONMENT_PREFIX, OPTIONS, resolve
from qlinear_service.errors import ConfigError
from qlinear_service.metric_families import new_families

ADAPTER = ROOT / "deploy/helm/adapter-rules.yaml"
OWNED = {"host", "port", "metrics_port", "cache_dir", "cpu_threads"} | {
    *("device", "devices", "device_mode"),
    *("max_queue_bytes", "drain_delay_seconds", "grace_seconds", "trace_endpoint"),
}
"""Options that the chart sets itself, from values of other names."""


@pytest.mark.parametrize("name", VALUES)
def test_the_server_understands_the_container(name: str) -> None:
    path, config = configuration(name)
    assert path.startswith("/models")
    assert config.server.host in ("0.0.0.0", "::")
    assert str(config.kernels.cache_dir) == "/cache"
    assert config.kernels.device == ("cpu" if name == "cpu" else "cuda:0")


def test_values_arrive_as_they_were_given() -> None:
    path, config = configuration("everything")
    assert path == "/models/all.safetensors"
    assert config.server.host == "::"
    assert config.server.reflection is False
    assert config.server.log_format == "json"
    assert config.limits.max_queue_bytes == 2 << 30
    assert config.limits.max_queue_age_seconds == 2.5
    assert config.batching.max_batch_rows == 2_000_000
    assert config.kernels.batch_invariant is True
    assert config.tracing.trace_endpoint == "http://collector.monitoring:4317"
    assert configuration("cpu")[0] == "/models/one.safetensors"


def test_a_server_without_a_gpu_has_as_many_threads_as_cores() -> None:
    (threads,) = [e for e in server("cpu")["env"] if e["name"] == "QLINEAR_CPU_THREADS"]
    assert threads["valueFrom"]["resourceFieldRef"] == {
        "containerName": server("cpu")["name"],
        "resource": "limits.cpu",
    }
    assert configuration("cpu")[1].kernels.cpu_threads == 4
    assert "nvidia.com/gpu" not in str(manifests("cpu"))


def test_options_are_all_of_the_servers_that_the_chart_does_not_set() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    options = schema["properties"]["server"]["properties"]["options"]["propertyNames"]["enum"]
    assert set(options) == OPTIONS.keys() - OWNED
    words = [word for name in ("everything", "cpu", "gpus") for word in server(name)["args"]]
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert {option.flag for name, option in OPTIONS.items() if name in OWNED} - flags == {
        "--cpu-threads"
    }


def test_variables_of_services_would_stop_the_server_and_are_off() -> None:
    with pytest.raises(ConfigError, match="QLINEAR_METRICS_PORT"):
        resolve(environ={"QLINEAR_METRICS_PORT": "tcp://10.0.0.1:9464"})
    assert services("defaults")[1]["metadata"]["name"] == "qlinear-metrics"
    assert ENVIRONMENT_PREFIX == "QLINEAR_"
    for name in VALUES:
        assert pod(name)["enableServiceLinks"] is False
        assert only(name, "Pod")["spec"]["enableServiceLinks"] is False


def test_ports_are_the_servers_everywhere() -> None:
    _, config = configuration("everything")
    grpc, metrics = config.server.port, config.server.metrics_port
    assert (grpc, metrics) == (ServerConfig().port, ServerConfig().metrics_port)
    container = server("everything")
    assert [(p["name"], p["containerPort"]) for p in container["ports"]] == [
        ("grpc", grpc),
        ("metrics", metrics),
    ]
    ports = [service["spec"]["ports"] for service in services("everything")]
    assert [[(p["port"], p["targetPort"]) for p in found] for found in ports] == [
        [(grpc, "grpc")],
        [(metrics, "metrics")],
    ]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == grpc
    (target,) = [w for w in only("everything", "Pod")["spec"]["containers"][0]["args"] if ":" in w]
    assert target == f"--target=matrices:{grpc}"


def test_each_probe_asks_its_own_question() -> None:
    container = server("defaults")
    asked = {name: container[f"{name}Probe"]["grpc"]["service"] for name in PROBES}
    assert asked == PROBES
    assert set(asked.values()) <= set(health.HEALTH_NAMES)
    assert len(set(asked.values())) == 3
    assert asked["readiness"] in health.TRAFFIC_NAMES
    assert asked["liveness"] not in health.TRAFFIC_NAMES
    doctor = only("defaults", "Pod")["spec"]["containers"][0]["args"]
    assert doctor[:2] == ["doctor", "--health"]
    assert f"--service={asked['readiness']}" in doctor


PROBES = {"startup": health.STARTUP, "readiness": "readiness", "liveness": health.LIVENESS}


def test_probes_wait_as_long_as_the_values_say() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["probes"]
    for name in PROBES:
        probe = server("defaults")[f"{name}Probe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == values[f"{name}Seconds"]
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]


@pytest.mark.parametrize("name", VALUES)
def test_the_drain_fits_before_the_pod_is_killed(name: str) -> None:
    timing = configuration(name)[1].server
    hook = server(name).get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
    slept = hook["preStop"]["sleep"]["seconds"]
    # What Server._finish waits for beyond the grace, each bounded.
    last_words = 5 * life.LAST_WORDS_SECONDS + life.MOST_QUIET_SECONDS
    needed = slept + timing.drain_delay_seconds + timing.grace_seconds + last_words
    assert needed + 5 <= pod(name)["terminationGracePeriodSeconds"] <= needed + 15


def test_a_leaving_server_answers_until_the_cluster_has_noticed() -> None:
    assert server("defaults")["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5
    assert 5 <= configuration("defaults")[1].server.drain_delay_seconds <= 10


@pytest.mark.parametrize("name", VALUES)
def test_the_area_that_a_gpu_server_locks_fits_into_its_memory(name: str) -> None:
    resources = server(name)["resources"]
    limit = int(resources["limits"]["memory"].removesuffix("Gi")) << 30
    assert configuration(name)[1].limits.max_queue_bytes * 2 <= limit
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_versions_are_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version
    assert server("defaults")["image"] == f"qlinear:{version}"
    assert server("everything")["image"] == f"qlinear@sha256:{'0' * 64}"


def known(expression: str) -> bool:
    """Say whether a query asks for metrics of the server, and only for such."""
    names = metrics_of(expression)
    return bool(names) and names <= new_families().keys()


def test_scaling_asks_for_metrics_that_the_server_has() -> None:
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    assert known(rule["seriesQuery"])
    (metric,) = only("hpa", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    (trigger,) = only("keda", "ScaledObject")["spec"]["triggers"]
    assert known(trigger["metadata"]["query"])
    assert trigger["metadata"]["threshold"] == "64"
    assert not known("sum(qlinear_rows)")


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_the_scaler_owns_the_number_of_replicas(name: str) -> None:
    deployment = only(name, "Deployment")
    assert "replicas" not in deployment["spec"]
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[name]
    scaled = only(name, kind)["spec"]["scaleTargetRef"]
    assert scaled == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }


def test_prometheus_finds_the_metrics_service_under_the_job_of_the_alerts() -> None:
    spec = only("everything", "ServiceMonitor")["spec"]
    calls, metrics = services("everything")
    wanted = spec["selector"]["matchLabels"].items()
    assert wanted <= metrics["metadata"]["labels"].items()
    assert not wanted <= calls["metadata"]["labels"].items()
    assert spec["endpoints"][0]["port"] == metrics["spec"]["ports"][0]["name"]
    elsewhere = render(VALUES["everything"], release="llama")
    (labels,) = [m["metadata"]["labels"] for m in elsewhere if "metrics" in m["metadata"]["name"]]
    assert labels[spec["jobLabel"]] == "qlinear"
    assert 'job="qlinear"' in str(rules("alert"))
    assert metrics["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in calls["spec"]
    assert calls["spec"]["clusterIP"] == "None"


def test_the_rules_are_those_of_deploy_prometheus() -> None:
    groups = only("everything", "PrometheusRule")["spec"]["groups"]
    shown: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
    written = [*rules("record").values(), *rules("alert").values()]
    texts = [sorted(json.dumps(rule, sort_keys=True) for rule in all_) for all_ in (shown, written)]
    assert texts[0] == texts[1]


def test_links_of_alerts_lead_where_the_values_say() -> None:
    book = "https://example.com/qlinear/operations"
    rules_there = {"monitoring": {"rules": True, "runbookUrl": book}}
    (made,) = [m for m in render({**VALUES["defaults"], **rules_there})
               if m["kind"] == "PrometheusRule"]  # fmt: skip
    shown = [rule for group in made["spec"]["groups"] for rule in group["rules"]]
    links = {r["alert"]: r["annotations"]["runbook_url"] for r in shown if "alert" in r}
    assert links.keys() == rules("alert").keys()
    for name, link in links.items():
        assert link == f'{{{{ or "{book}" "docs/operations.md" }}}}#{name.lower()}'
    for broken in ("docs/operations.md", "https://a/{{", "https://a/'b", "https://a/#b"):
        with pytest.raises(Exception, match="runbookUrl"):
            render({**VALUES["defaults"], "monitoring": {"runbookUrl": broken}})


def test_the_policy_opens_only_what_is_used() -> None:
    spec = only("everything", "NetworkPolicy")["spec"]
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == ["grpc", "metrics"]
    assert all(rule["from"] for rule in spec["ingress"])
    ports = [port["port"] for rule in spec["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 4317, 8443]
    assert only("defaults", "NetworkPolicy")["spec"]["egress"] == []
    for url, port in (("http://a/b", 80), ("https://a/b", 443), ("http://[::1]:70/b", 70)):
        model = {"download": {"url": url, "sha256": "0" * 64}}
        (policy,) = [m for m in render({"model": model}) if m["kind"] == "NetworkPolicy"]
        assert policy["spec"]["egress"][1]["ports"][0]["port"] == port
    closed = {"clients": [], "monitoring": []}
    policies = render({**VALUES["defaults"], "networkPolicy": closed})
    (policy,) = [m for m in policies if m["kind"] == "NetworkPolicy"]
    assert policy["spec"]["ingress"] is None
    assert policy["metadata"].get("namespace", NAMESPACE) == NAMESPACE


@pytest.mark.parametrize("name", VALUES)
def test_containers_may_do_nothing_that_they_need_not(name: str) -> None:
    for spec in (pod(name), only(name, "Pod")["spec"]):
        assert spec["automountServiceAccountToken"] is False
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    writable = {m["mountPath"] for m in server(name)["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/cache", "/tmp"}


def test_a_gpu_pod_asks_for_one_and_goes_where_they_are() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert server("defaults")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod("defaults")["tolerations"] == [taint]
    assert server("everything")["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1
    assert pod("everything")["tolerations"] == [taint, VALUES["everything"]["tolerations"][0]]
    assert pod("everything")["runtimeClassName"] == "nvidia"
    assert server("gpus")["resources"]["limits"]["nvidia.com/gpu"] == 4
    kernels = configuration("gpus")[1].kernels
    assert (kernels.cuda_ordinals, kernels.device_mode) == ((0, 1, 2, 3), "replicate")
    assert configuration("defaults")[1].kernels.cuda_ordinals == (0,)
    assert "tolerations" not in pod("cpu")
