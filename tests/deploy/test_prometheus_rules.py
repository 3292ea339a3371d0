"""The rules of deploy/prometheus: Prometheus accepts them, and each alert fires when it must.

Each has its chapter in the runbook, and all ask for metrics that there are.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_tools import (
    ANNOUNCED,
    PROMETHEUS,
    metrics_of,
    promtool,
    records_of,
    rule_files,
    rules,
)
from source_tree import ROOT

from qlinear_service.metric_families import new_families

CASES = sorted((PROMETHEUS / "tests").glob("*.yml"))
RUNBOOK = ROOT / "docs/operations.md"
PARTS = ("**Means.**", "**Look at.**", "**Do.**")


def cases() -> list[dict[str, Any]]:
    return [test for path in CASES for test in yaml.safe_load(path.read_text())["tests"]]


def anchor(heading: str) -> str:
    """The anchor that a heading of a paper gets where it is shown."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.compose.yml"])
def test_promtool_accepts_the_configuration_and_the_rules(name: str) -> None:
    said = promtool("check", "config", PROMETHEUS / name)
    assert f"{len(rule_files())} rule files found" in said


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_alerts_fire_when_they_must_and_only_then(path: Path) -> None:
    promtool("test", "rules", path)


def test_links_lead_where_the_external_label_says(tmp_path: Path) -> None:
    """The cases in tests/ have no such label, and links within a checkout."""
    test = yaml.safe_load((PROMETHEUS / "tests/health_test.yml").read_text())
    test["rule_files"] = [str(path) for path in rule_files()]
    for case in test["tests"]:
        case["external_labels"] = {"qlinear_runbook": "https://example.com/book"}
        for check in case["alert_rule_test"]:
            for alert in check["exp_alerts"]:
                texts = alert["exp_annotations"]
                _, _, fragment = texts["runbook_url"].partition("#")
                texts["runbook_url"] = f"https://example.com/book#{fragment}"
    path = tmp_path / "linked.yml"
    path.write_text(yaml.safe_dump(test))
    promtool("test", "rules", path)


def test_every_alert_has_a_case_that_fires_and_one_that_must_not() -> None:
    fires: dict[str, set[bool]] = defaultdict(set)
    for case in cases():
        for check in case["alert_rule_test"]:
            fires[check["alertname"]].add(bool(check["exp_alerts"]))
    assert fires == {name: {True, False} for name in rules("alert")}


@pytest.mark.parametrize("name", rules("alert"))
def test_every_alert_has_its_chapter_in_the_runbook(name: str) -> None:
    begin, _, fragment = rules("alert")[name]["annotations"]["runbook_url"].partition("#")
    assert begin == '{{ or $externalLabels.qlinear_runbook "docs/operations.md" }}'
    chapters = re.split(r"^#+ ", RUNBOOK.read_text(), flags=re.MULTILINE)
    texts = {anchor(text.partition("\n")[0]): text for text in chapters}
    assert fragment == anchor(name)
    for part in PARTS:
        assert part in texts[fragment], f"{name} has no {part}"


def test_the_runbook_has_no_chapter_of_an_alert_that_is_gone() -> None:
    chapters = re.findall(r"^#+ (Qlinear\w+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    assert chapters == list(rules("alert"))


def test_rules_ask_for_metrics_and_records_that_there_are() -> None:
    asked = {**rules("alert"), **rules("record")}.values()
    known = ANNOUNCED | new_families().keys()
    assert set().union(*(metrics_of(rule["expr"]) for rule in asked)) <= known
    assert set().union(*(records_of(rule["expr"]) for rule in asked)) <= rules("record").keys()


def test_every_record_is_asked_for_by_something() -> None:
    """A record that nobody reads is computed every ten seconds for nothing."""
    dashboard = (ROOT / "deploy/grafana/dashboards/qlinear.json").read_text()
    asked = [rule["expr"] for kind in ("alert", "record") for rule in rules(kind).values()]
    read = set().union(*map(records_of, [*asked, dashboard]))
    assert rules("record").keys() <= read


def test_the_latency_objective_is_the_bucket_that_slow_calls_are_counted_by() -> None:
    objective = rules("record")["qlinear:objective_latency_seconds"]["expr"]
    bounds = {
        bound
        for rule in rules("record").values()
        for bound in re.findall(r'le="([\d.]+)"', rule["expr"])
    }
    assert {float(bound) for bound in bounds} == {float(objective[len("vector(") : -1])}
    assert {float(bound) for bound in bounds} <= set(
        new_families()["qlinear_request_seconds"].bounds
    )
