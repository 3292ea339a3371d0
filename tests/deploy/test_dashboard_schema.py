"""The dashboard beside the types that Grafana publishes of what it reads; a compiler compares.

The code that makes the dashboard uses another package of Grafana's; this one is what its own pages
are written against. A whole Grafana cannot be had from a package registry.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dashboard_queries import DASHBOARD

pytestmark = pytest.mark.slow

HOME = Path(sys.prefix) / "grafana-schema"
SCHEMA = HOME / "node_modules/@grafana/schema/dist/esm/raw"
KINDS = {
    "bargauge": "bargauge/panelcfg/x/BarGaugePanelCfg_types.gen",
    "heatmap": "heatmap/panelcfg/x/HeatmapPanelCfg_types.gen",
    "stat": "stat/panelcfg/x/StatPanelCfg_types.gen",
    "status-history": "statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen",
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen",
}
INTERVALS = {"auto", "auto_count", "auto_min"}
"""Defaults of variables of one kind, which the code that makes the dashboard gives to all."""

CUSTOM = {"heatmap", "status-history", "timeseries"}
"""Kinds whose fields have options of their own."""

# JSON has the values of enumerations, the types their names; what has a default may be left out.
HEAD = """
import type {{ Dashboard }} from "{schema}/dashboard/x/dashboard_types.gen";
type Json<T> = T extends string ? `${{T}}` : T extends number | boolean | null ? T
  : T extends Array<infer Item> ? Json<Item>[]
  : T extends object ? {{ [Key in keyof T]?: Json<T[Key]> }} : T;
export const dashboard: Json<Dashboard> = {dashboard};
"""


@pytest.fixture(scope="module", autouse=True)
def schema() -> None:
    if SCHEMA.is_dir() and shutil.which("node"):
        return
    missing = "Grafana's types are missing: make dashboard-schema installs them"
    if os.environ.get("CI_REQUIRE_DASHBOARD_SCHEMA") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


def complaints(folder: Path, dashboard: dict[str, Any]) -> list[str]:
    """Return what TypeScript says of a dashboard as a value of Grafana's types."""
    variables = [
        {key: value for key, value in one.items() if key not in INTERVALS}
        for one in dashboard["templating"]["list"]
    ]
    dashboard = {**dashboard, "templating": {"list": variables}}
    text = HEAD.format(schema=SCHEMA, dashboard=json.dumps(dashboard, indent=1))
    for kind, module in KINDS.items():
        name = kind.replace("-", "_")
        text += f'import type * as {name} from "{SCHEMA}/composable/{module}";\n'
    for number, panel in enumerate(dashboard["panels"]):
        kind = panel["type"]
        if kind == "row":
            continue
        name = kind.replace("-", "_")
        found = {"options": ("Options", panel.get("options", {}))}
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        if kind in CUSTOM:
            found["custom"] = ("FieldConfig", defaults.get("custom", {}))
        else:
            assert "custom" not in defaults, panel["title"]
        for part, (of, value) in found.items():
            text += f"export const {part}{number}: Json<{name}.{of}> = {json.dumps(value)};\n"
    path = folder / "dashboard.ts"
    path.write_text(text)
    words = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022"]
    words += ["--module", "esnext", "--moduleResolution", "bundler", "--pretty", "false"]
    compiler = HOME / "node_modules/typescript/bin/tsc"
    done = subprocess.run(["node", compiler, *words, path], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert bool(lines) == bool(done.returncode), done.stderr
    return lines


def test_grafana_knows_every_word_of_it(tmp_path: Path) -> None:
    assert complaints(tmp_path, DASHBOARD) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("refesh",), "10s"),
        (("time", "from"), 7),
        (("graphTooltip",), "crosshair"),
        (("panels", 1, "gridPos", "height"), 4),
        (("panels", 1, "options", "textMode"), "names"),
        (("panels", 1, "options", "wide"), True),
        (("panels", 1, "fieldConfig", "defaults", "colour"), "red"),
    ],
)
def test_it_would_notice(tmp_path: Path, path: tuple[str | int, ...], value: object) -> None:
    """A word that Grafana does not know, or a value that is none, is what it passes over."""
    damaged: Any = json.loads(json.dumps(DASHBOARD))
    place = damaged
    for step in path[:-1]:
        place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
    place[path[-1]] = value
    assert complaints(tmp_path, damaged) != []
