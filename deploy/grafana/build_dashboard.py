"""Writes the dashboard's JSON: `make dashboard`, or this file with a path to write to.

The same code always gives the same bytes; a test compares them with what is committed.
"""

import json
import sys
from pathlib import Path

from dashboard_panels import DATASOURCE
from dashboard_rows import ROWS
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

OUTPUT = Path(__file__).parent / "dashboards/qlinear.json"


def variable(name: str, label: str, metric: str) -> dashboard.QueryVariable:
    """Return a choice among the values that a label of `metric` has; all of them at first."""
    made = dashboard.QueryVariable(name).label(label).datasource(DATASOURCE)
    made.query(f"label_values({metric}, {name})").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    made.sort(VariableSort.ALPHABETICAL_ASC).multi(True).include_all(True)
    return made.current(VariableOption(selected=True, text="All", value="$__all"))


def build() -> str:
    """Return the dashboard as JSON."""
    made = dashboard.Dashboard("qlinear").uid("qlinear").tags(["qlinear"])
    made.description("Is it healthy, is the device doing what it can, where does the time go.")
    made.tooltip(DashboardCursorSync.CROSSHAIR).time("now-1h", "now").refresh("10s").readonly()
    made.timezone("browser")
    made.with_variable(dashboard.DatasourceVariable("datasource").label("Data").type("prometheus"))
    made.with_variable(variable("instance", "Server", "qlinear_ready"))
    made.with_variable(variable("shape", "Shape", "qlinear_queue_seconds_count"))
    number = 0
    for title, panels in ROWS.items():
        number += 1
        made.with_row(dashboard.Row(title).id(number))
        for panel in panels():
            number += 1
            made.with_panel(panel.id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else OUTPUT).write_text(build())
