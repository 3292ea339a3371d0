"""The committed Grafana dashboard, as tests read it: its panels and what they ask Prometheus."""

import json
from typing import Any

from source_tree import ROOT

GRAFANA = ROOT / "deploy/grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards/qlinear.json").read_text())

GRAFANAS_OWN = {"$__rate_interval": "1m", "$instance": ".*", "$shape": ".*"}
"""What Grafana puts in place of its variables, with everything chosen."""


def panels() -> list[dict[str, Any]]:
    """The panels in their order, rows left out."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Every query, ready to be asked, by the title of its row and panel and its letter."""
    found, row = {}, ""
    for panel in DASHBOARD["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        for target in panel.get("targets", []):
            expr = target["expr"]
            for variable, value in GRAFANAS_OWN.items():
                expr = expr.replace(variable, value)
            found[f"{row}/{panel['title']}/{target['refId']}"] = expr
    return found
