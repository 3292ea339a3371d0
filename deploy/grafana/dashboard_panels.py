"""The kinds of panels on the dashboard: one function each, all with the same few words.

Knows how panels look, not what they show (`dashboard_rows.py`).
"""

from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statushistory,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueTextMode,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
HEIGHT = 8

Panel = Any
"""A panel's builder; the SDK has one class for each kind and no common one with these methods."""


class Query(NamedTuple):
    """What to ask Prometheus, and what to call each answer."""

    expr: str
    legend: str = "{{instance}}"


def _targets(panel: Panel, queries: tuple[Query, ...], *, instant: bool = False) -> Panel:
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
        panel.with_target(target.instant() if instant else target.range())
    return panel


def _framed(panel: Panel, title: str, text: str, unit: str, width: int, height: int) -> Panel:
    panel.title(title).description(text).datasource(DATASOURCE).unit(unit)
    return panel.span(width).height(height)


def steps(*pairs: tuple[float, str]) -> dashboard.ThresholdsConfig:
    """Return colours: the first one from below, each other one from its value on."""
    made = [Threshold(value=None if i == 0 else at, color=c) for i, (at, c) in enumerate(pairs)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(made)


PLAIN = ((0.0, "text"),)


def value(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    colours: tuple[tuple[float, str], ...] = PLAIN,
    words: dict[str, str] | None = None,
    names_only: bool = False,
    width: int = 4,
) -> Panel:
    """Return a panel of large numbers, one for each series, as they are now."""
    panel = _framed(stat.Panel(), title, text, unit, width, 4)
    panel.thresholds(steps(*colours))
    if words:
        shown = {key: ValueMappingResult(text=word) for key, word in words.items()}
        panel.mappings([ValueMap(options=shown)])
    if names_only:
        panel.text_mode(BigValueTextMode.NAME)
    return _targets(panel, queries, instant=True)


def lines(
    title: str,
    text: str,
    *queries: Query,
    unit: str = "short",
    stacked: bool = False,
    top: float | None = None,
    width: int = 8,
) -> Panel:
    """Return a panel of lines over time."""
    panel = _framed(timeseries.Panel(), title, text, unit, width, HEIGHT)
    panel.min(0).fill_opacity(40 if stacked else 5).show_points(VisibilityMode.NEVER)
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if top is not None:
        panel.axis_soft_max(top)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    panel.tooltip(tooltip.sort(SortOrder.DESCENDING))
    return _targets(panel, queries)


def cells(
    title: str,
    text: str,
    query: Query,
    *,
    unit: str,
    scheme: FieldColorModeId,
    most: float | None = None,
    width: int = 12,
) -> Panel:
    """Return a map of heat: one line of cells for each series, time to the right."""
    panel = _framed(statushistory.Panel(), title, text, unit, width, HEIGHT + 2)
    panel.min(0).color_scheme(dashboard.FieldColor().mode(scheme)).show_value(VisibilityMode.NEVER)
    if most is not None:
        panel.max(most)
    panel.max_data_points(120)
    return _targets(panel, (query,))


def buckets(title: str, text: str, query: Query, *, repeat: str) -> Panel:
    """Return a map of heat of a histogram's buckets, once for each value of a variable."""
    panel = heatmap.Panel().title(title).description(text).datasource(DATASOURCE)
    panel.span(24).height(HEIGHT).calculate(False)
    panel.y_axis(heatmap.YAxisConfig().unit("s"))
    colour = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    panel.color(colour.steps(64)).repeat(repeat).repeat_direction("h").max_per_row(3)
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id("A")
    return panel.with_target(target.format(PromQueryFormat.HEATMAP).range())


def bars(title: str, text: str, *queries: Query, unit: str, top: float, width: int = 12) -> Panel:
    """Return a panel of bars as they are now, green where they are long."""
    panel = _framed(bargauge.Panel(), title, text, unit, width, HEIGHT).min(0).max(top)
    panel.display_mode(BarGaugeDisplayMode.GRADIENT).orientation(VizOrientation.HORIZONTAL)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_RD_YL_GR))
    return _targets(panel, queries, instant=True)
