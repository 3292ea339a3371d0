"""The Grafana dashboard: made by its code, whole, laid out without gaps, and provisioned."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dashboard_queries import DASHBOARD, GRAFANA, panels, queries
from prometheus_tools import (
    ANNOUNCED,
    NOT_ON_A_CPU,
    PROMETHEUS,
    metrics_of,
    needs,
    promtool,
    records_of,
    rule_files,
    rules,
)

from qlinear_service.metric_families import new_families

ROWS = [
    "Health",
    "Traffic",
    "Where the time goes",
    "Batching",
    "Shapes",
    "Roofline",
    "Overload",
    "GPU",
]


@pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None,
    reason="grafana-foundation-sdk is missing: make lint installs it",
)
def test_the_committed_dashboard_is_what_its_code_makes(tmp_path: Path) -> None:
    made = tmp_path / "made.json"
    subprocess.run([sys.executable, GRAFANA / "build_dashboard.py", made], check=True)
    committed = (GRAFANA / "dashboards/qlinear.json").read_text()
    assert made.read_text() == committed, "run: make dashboard"


def test_it_has_its_rows_and_each_has_panels() -> None:
    assert [one["title"] for one in DASHBOARD["panels"] if one["type"] == "row"] == ROWS
    assert {name.partition("/")[0] for name in queries()} == set(ROWS)


def test_every_panel_says_how_to_read_it_and_asks_the_chosen_source() -> None:
    for panel in panels():
        assert panel["description"].endswith((".", "?")), panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "$datasource", panel["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_fill_the_width_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    lines = {y for _, y in taken}
    assert taken == {(x, y) for x in range(24) for y in lines}


def test_queries_ask_for_metrics_and_records_that_there_are() -> None:
    for name, query in queries().items():
        assert metrics_of(query) <= ANNOUNCED | new_families().keys(), name
        assert records_of(query) <= rules("record").keys(), name
        assert "$" not in query, f"{name} has a variable that no test knows"


def test_every_metric_is_shown_or_stands_behind_what_is_shown() -> None:
    """An operator who looks at the dashboard overlooks nothing that is measured."""
    asked = [*queries().values(), *(rule["expr"] for rule in rules("record").values())]
    shown = set().union(*map(metrics_of, asked))
    # The ten-second gauge of what the recording rules compute over longer windows.
    assert new_families().keys() - shown == {"qlinear_hbm_bandwidth_bytes_per_second"}


def test_promtool_reads_every_query(tmp_path: Path) -> None:
    """One file of rules, each a query: the parser of Prometheus itself looks at all of them."""
    records = [
        {"record": f"q{number}", "expr": query} for number, query in enumerate(queries().values())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", path)


def test_what_no_cpu_shows_has_data_from_made_up_series(tmp_path: Path) -> None:
    """A real server on a CPU cannot answer these: their labels must match all the same."""
    target = 'job="qlinear", instance="a"'
    device = f'{target}, device="cuda:0"'
    shape, m = 'shape="s"', 'm="32"'
    series = {name: f"{name}{{{device}}}" for name in NOT_ON_A_CPU}
    series["qlinear_sweet_spot_rows"] = f"qlinear_sweet_spot_rows{{{device}, {shape}}}"
    for name in (
        "qlinear_tuned_bandwidth_bytes_per_second",
        "qlinear_kernel_bytes_total",
        "qlinear_kernel_busy_seconds_total",
    ):
        series[name] = f"{name}{{{device}, {shape}, {m}}}"
    for name in ("qlinear_batch_rows_sum", "qlinear_batch_rows_count"):
        series[name] = f"{name}{{{target}, {shape}}}"
    asked = {name: query for name, query in queries().items() if needs(query) & NOT_ON_A_CPU.keys()}
    assert set().union(*(needs(query) for query in asked.values())) >= NOT_ON_A_CPU.keys()
    case = {
        "interval": "10s",
        "input_series": [{"series": one, "values": "1+1x60"} for one in series.values()],
        "promql_expr_test": [
            {"expr": f"count({query})", "eval_time": "10m", "exp_samples": [{"value": 1}]}
            for query in asked.values()
        ],
    }
    test = {"rule_files": [str(path) for path in rule_files()], "tests": [case]}
    path = tmp_path / "gpu.yml"
    path.write_text(yaml.safe_dump(test | {"evaluation_interval": "10s"}))
    promtool("test", "rules", path)


def test_provisioning_and_prometheus_agree() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (data,) = source["datasources"]
    assert data["type"] == "prometheus"
    assert data["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert config["scrape_configs"][0]["job_name"] == "qlinear"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/qlinear.yml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
    assert [path.name for path in (GRAFANA / "dashboards").iterdir()] == ["qlinear.json"]
