"""Helm lints and renders the chart; Kubernetes' strict schemas accept every manifest."""

import re
from typing import Any

import custom_resources
import helm_chart
import helm_python
import kubernetes_validate
import pytest
import yaml
from helm_chart import CHART, CLAIM, VALUES, manifests, only, render, services

ENVOY = CHART.parents[1] / "envoy/kubernetes.yaml"
VERSIONS = ("1.30", "1.37")
"""The oldest Kubernetes that Chart.yaml allows, and the newest with schemas."""


@pytest.mark.parametrize("name", VALUES)
def test_helm_has_nothing_to_complain_about(name: str) -> None:
    report = helm_chart.helm.lint(CHART, VALUES[name], strict=True, kube_version="v1.30.0")
    said = [line["error"] for line in report["messages"]] + report["errors"]
    assert said == ["icon is recommended"]


def test_the_oldest_kubernetes_is_the_one_that_is_allowed() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == ">=1.30.0-0"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", VALUES)
def test_every_manifest_is_valid(name: str, version: str) -> None:
    for manifest in manifests(name):
        if custom_resources.is_custom(manifest):
            custom_resources.validate(manifest)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_of_envoy_are_valid_and_fit_each_other(version: str) -> None:
    deployment, service, budget = yaml.safe_load_all(ENVOY.read_text())
    for manifest in (deployment, service, budget):
        kubernetes_validate.validate(manifest, version, strict=True)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    assert [*selectors, budget["spec"]["selector"]["matchLabels"]] == [labels] * 3
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == service["spec"]["ports"][0]["port"] == 50051


def test_the_schemas_are_strict() -> None:
    deployment = only("defaults", "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def test_kinds_are_those_that_were_asked_for() -> None:
    always = {"Deployment", "Service", "Pod"}
    usual = always | {"PodDisruptionBudget", "NetworkPolicy"}
    expected = {
        "defaults": usual,
        "cpu": usual,
        "hpa": usual | {"HorizontalPodAutoscaler"},
        "keda": usual | {"ScaledObject"},
        "everything": usual | {"ServiceMonitor", "PrometheusRule"},
        "gpus": usual,
        "nothing": always,
    }
    assert {name: {m["kind"] for m in manifests(name)} for name in VALUES} == expected


@pytest.mark.parametrize("name", VALUES)
def test_selectors_find_the_pods_of_the_server_and_no_others(name: str) -> None:
    deployment = only(name, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    test_labels = only(name, "Pod")["metadata"]["labels"].items()
    selectors = [deployment["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in services(name)]
    for manifest in manifests(name):
        if manifest["kind"] == "PodDisruptionBudget":
            selectors.append(manifest["spec"]["selector"]["matchLabels"])
        elif manifest["kind"] == "NetworkPolicy":
            selectors.append(manifest["spec"]["podSelector"]["matchLabels"])
    for selector in selectors:
        assert selector.items() <= labels
        assert not selector.items() <= test_labels


def test_two_releases_do_not_get_into_each_others_way() -> None:
    one, two = (render({"model": CLAIM}, release=name) for name in ("qlinear", "llama"))
    names = [{(m["kind"], m["metadata"]["name"]) for m in release} for release in (one, two)]
    assert not names[0] & names[1]
    assert {name.removesuffix("-metrics").removesuffix("-ready") for _, name in names[1]} == {
        "llama-qlinear"
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({}, "there is no model"),
    "two models": ({"model": {**CLAIM, **helm_chart.DOWNLOAD}}, "are both set"),
    "no checksum": ({"model": {"download": {"url": "http://a/b"}}}, "sha256"),
    "a folder": ({"model": {"download": {"url": "http://a/b/", "sha256": "0" * 64}}}, "url"),
    "unknown value": ({"model": CLAIM, "replica": 3}, "replica"),
    "unknown option": ({"model": CLAIM, "server": {"options": {"max_rows": 1}}}, "max_rows"),
    "owned option": ({"model": CLAIM, "server": {"options": {"port": 1}}}, "port"),
    "locked memory": (
        {"model": CLAIM, "server": {"maxQueueBytes": (4 << 30) + 1}},
        r"limits.memory is 8Gi; expected at least twice server.maxQueueBytes \(4294967297\)",
    ),
    "no cores": ({"model": CLAIM, "gpu": {"enabled": False}}, "cpu"),
    "replicas": ({"model": CLAIM, "autoscaling": {"maxReplicas": 1}}, "maxReplicas is 1; expected"),
    "kind": ({"model": CLAIM, "autoscaling": {"kind": "vpa"}}, "kind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_work_are_refused(case: str) -> None:
    values, said = REFUSED[case]
    with pytest.raises(helm_python.HelmError, match=said):
        render(values)


def test_every_value_is_described_and_used() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert schema["properties"].keys() - {"global"} == values.keys()
    texts = "".join(path.read_text() for path in CHART.glob("templates/**/*.*"))
    for group, value in values.items():
        properties = schema["properties"][group].get("properties")
        if properties is not None and group != "resources":
            assert properties.keys() == value.keys(), group
        for key in value if properties else ():
            used = rf"\.{key}\b|\.Values\.{group}\b(?!\.)"
            assert re.search(used, texts), f"no template uses {group}.{key}"
        assert f".Values.{group}" in texts
