"""The page at the metrics port's root: what one server does now, for somebody who just looks.

One self-contained HTML document, built anew at each request from the same numbers that /metrics
shows. Its script only fetches it again. Everything that comes from files or clients is escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import islice

from qlinear_service.bandwidth import WINDOW_SECONDS, Live
from qlinear_service.metric_families import Histogram, quantile
from qlinear_service.metrics import Metrics

__all__ = ["render"]

MOST_LAYERS = 400
"""Rows of the table of layers; with more the page would grow beyond 100 KB."""

STYLE = """
:root{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}
body{max-width:72rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin:1.6rem 0 .3rem}
.state{padding:.1em .6em;border-radius:1em;border:1px solid currentColor}
.serving{color:light-dark(#176b2c,#6fd48a)}.starting,.draining,.gone{color:light-dark(#8a5300,#f0b35a)}
table{border-collapse:collapse;width:100%}
th,td{text-align:right;padding:.2rem .7rem;border-bottom:1px solid #8884}
th:first-child,td:first-child{text-align:left}th{font-weight:600;opacity:.75}
td{font-variant-numeric:tabular-nums}p{opacity:.75;margin:.3rem 0}
"""

SCRIPT = """
async function again(){
 try{
  if(!document.hidden){
   const text=await(await fetch('/')).text();
   const page=new DOMParser().parseFromString(text,'text/html');
   document.querySelector('main').replaceWith(page.querySelector('main'));
  }
 }catch{
  const state=document.querySelector('.state');
  state.textContent='unreachable';state.className='state gone';
 }
 setTimeout(again,2000);
}
setTimeout(again,2000);
"""


def render(metrics: Metrics) -> str:
    """Return the page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>qlinear</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head><body><main>{_head(metrics)}"
        f"<h2>Computing now</h2>{_live_table(metrics)}"
        f"<h2>Calls since the start</h2>{_calls_table(metrics)}"
        f"<h2>Layers</h2>{_layers_table(metrics)}</main>"
        f"<script>{SCRIPT}</script></body></html>"
    )


def _head(metrics: Metrics) -> str:
    state = escape(metrics.state())
    facts = [f"version {metrics.version}", f"device {metrics.device}"]
    if metrics.load is not None:
        packed = sum(layer.packed_bytes for layer in metrics.layers.values())
        waiting = sum(metrics.load.queue_rows().values())
        facts += [
            f"{len(metrics.layers)} layers, {_bytes(packed)}",
            f"{waiting} rows wait",
            f"{_bytes(metrics.load.inflight_bytes())} of "
            f"{_bytes(metrics.load.queue_limit_bytes)} in flight",
        ]
    peaks = metrics.families["qlinear_hbm_peak_bytes_per_second"].numbers.values()
    facts += [f"read peak {peak.value / 1e9:.1f} GB/s" for peak in list(peaks)]
    return (
        f'<h1>qlinear <span class="state {state}">{state}</span></h1>'
        f"<p>{escape(' · '.join(facts))}</p>"
        '<p><a href="/metrics">all metrics</a></p>'
    )


def _live_table(metrics: Metrics) -> str:
    live = metrics.live()
    if not live:
        return f"<p>Nothing in the last {WINDOW_SECONDS} s.</p>"
    columns = ("shape", "rows up to", "batches/s", "rows/s", "mean time", "bandwidth", "of floor")
    return _table(columns, map(_live_row, live))


def _live_row(one: Live) -> list[str]:
    ratio = one.roofline_ratio
    return [
        one.shape,
        one.m,
        f"{one.launches / WINDOW_SECONDS:.1f}",
        f"{one.rows / WINDOW_SECONDS:.1f}",
        _seconds(one.busy_seconds / one.launches),
        f"{one.bytes_per_second / 1e9:.2f} GB/s",
        "" if ratio is None else f"{ratio:.0%}",
    ]


def _calls_table(metrics: Metrics) -> str:
    families = metrics.families
    rows = [
        [
            shape,
            method,
            str(sum(answers.counts)),
            _seconds(quantile(answers.bounds, list(answers.counts), 0.5)),
            _seconds(quantile(answers.bounds, list(answers.counts), 0.99)),
            _mean(families["qlinear_queue_seconds"].histograms.get((shape,)), _seconds),
            _mean(families["qlinear_batch_rows"].histograms.get((shape,)), "{:.1f}".format),
            *_costs(metrics, shape),
        ]
        for (method, shape), answers in list(families["qlinear_request_seconds"].histograms.items())
    ]
    if not rows:
        return "<p>No call has been answered yet.</p>"
    columns = (
        *("shape", "method", "answered", "p50", "p99", "mean wait", "mean rows of a batch"),
        *("sweet spot", "capacity, rows/s"),
    )
    return _table(columns, rows)


def _costs(metrics: Metrics, shape: str) -> list[str]:
    curve = metrics.curves.get(shape)
    if curve is None:
        return ["", ""]
    return [str(curve.sweet_spot_rows), f"{curve.capacity_rows_per_second:,.0f}"]


def _layers_table(metrics: Metrics) -> str:
    waiting = {} if metrics.load is None else metrics.load.queue_rows()
    rows = (
        [name, layer.spec.shape, _bytes(layer.packed_bytes), str(waiting.get(name, 0))]
        for name, layer in metrics.layers.items()
    )
    table = _table(("layer", "shape", "memory", "rows waiting"), islice(rows, MOST_LAYERS))
    more = len(metrics.layers) - MOST_LAYERS
    return table + (f"<p>and {more} more</p>" if more > 0 else "")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _mean(histogram: Histogram | None, text: Callable[[float], str]) -> str:
    if histogram is None or not (count := sum(histogram.counts)):
        return ""
    return text(histogram.total / count)


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def _bytes(value: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value / 1024:.1f} KiB"
