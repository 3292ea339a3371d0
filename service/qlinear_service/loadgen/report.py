"""The end of a run, for people (tables) and for programs (JSON): the same numbers in both."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from qlinear_service.loadgen.progress import milliseconds
from qlinear_service.loadgen.samples import Verdict
from qlinear_service.loadgen.tally import Kind, Series, Tally

__all__ = ["Facts", "as_json", "print_report"]

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was run, and against what."""

    target: str
    server_version: str
    device: str
    transport: str
    loop: str
    """closed or open."""
    concurrency: int | None
    """Of the closed loop."""
    rate_per_second: float | None
    """Of the open loop, as asked for."""
    max_in_flight: int | None
    """Of the open loop."""
    seed: int
    warmup_seconds: float
    seconds: float
    """Measured; shorter than asked for if the run was interrupted."""
    interrupted: bool


def as_json(facts: Facts, tally: Tally, verdict: Verdict | None) -> dict[str, Any]:
    """Return the whole report, ready for json.dumps; latencies are in seconds."""
    return {
        "run": asdict(facts),
        "total": _numbers(tally.total(), facts.seconds),
        "series": [
            {"layer": layer, "rows": rows, "dtype": dtype, **_numbers(series, facts.seconds)}
            for (layer, rows, dtype), series in sorted(tally.series.items())
        ],
        "check": None if verdict is None else asdict(verdict),
    }


def _numbers(series: Series, seconds: float) -> dict[str, Any]:
    latency = {name: series.latency.percentile(value) for name, value in PERCENTILES.items()}
    latency["max"] = series.latency.max_seconds if series.latency.count else None
    return {
        "sent": series.sent,
        "answered": series.answered,
        "failed": dict(sorted(series.failed.items())),
        "unanswered": series.unanswered,
        "late": series.late,
        "not_sent": series.not_sent,
        "calls_per_second": series.answered / seconds if seconds else 0.0,
        "rows_per_second": series.rows_done / seconds if seconds else 0.0,
        "bytes_per_second": series.bytes_done / seconds if seconds else 0.0,
        "latency_seconds": latency,
    }


def print_report(console: Console, facts: Facts, tally: Tally, verdict: Verdict | None) -> None:
    """Print the tables and the sentences under them."""
    table = Table(box=None, header_style="bold")
    table.add_column("layer", overflow="fold")
    table.add_column("M", justify="right")
    table.add_column("x")
    for heading in ("sent", "answered"):
        table.add_column(heading, justify="right")
    table.add_column("failed")
    for heading in ("rows/s", "MB/s", *(f"{name} ms" for name in (*PERCENTILES, "max"))):
        table.add_column(heading, justify="right")
    for kind, series in sorted(tally.series.items()):
        table.add_row(*_cells(kind, series, facts.seconds))
    if len(tally.series) > 1:
        table.add_section()
        table.add_row(*_cells(("all", "", ""), tally.total(), facts.seconds))
    console.print(table)
    for sentence in _sentences(facts, tally.total(), verdict):
        console.print(sentence, soft_wrap=True)


def _cells(kind: Kind | tuple[str, str, str], series: Series, seconds: float) -> list[str]:
    numbers: Mapping[str, Any] = _numbers(series, seconds)
    failed = ", ".join(f"{count} {code}" for code, count in numbers["failed"].items())
    latency = numbers["latency_seconds"].values()
    return [
        *map(str, kind),
        f"{series.sent:,}",
        f"{series.answered:,}",
        failed or "0",
        f"{numbers['rows_per_second']:,.0f}",
        f"{numbers['bytes_per_second'] / 1e6:,.1f}",
        *map(milliseconds, latency),
    ]


def _sentences(facts: Facts, total: Series, verdict: Verdict | None) -> list[str]:
    loop = f"{facts.concurrency} callers"
    if facts.loop == "open":
        loop = f"{facts.rate_per_second:g} calls/s (Poisson), latency from the instant due"
    lines = [
        f"{facts.target}  qlinear {facts.server_version} on {facts.device}  {facts.loop} loop, "
        f"{loop}  {facts.seconds:.1f} s after {facts.warmup_seconds:g} s of warm-up  "
        f"transport {facts.transport}  seed {facts.seed}"
    ]
    if total.late:
        share = total.late / max(total.sent, 1)
        lines.append(
            f"{total.late} calls ({share:.1%}) went out late because this program was busy; their "
            "latency counts from when they were due"
        )
    if total.not_sent:
        lines.append(
            f"{total.not_sent} calls were due and NOT sent, because {facts.max_in_flight} were in "
            "flight (--max-in-flight): the percentiles above flatter the server"
        )
    if total.unanswered:
        lines.append(f"{total.unanswered} calls were cut off by the interruption")
    if verdict is not None:
        lines.append(_verdict_sentence(verdict))
    return lines


def _verdict_sentence(verdict: Verdict) -> str:
    text = (
        f"checked {verdict.checked} sampled answers against {verdict.against}: "
        f"{verdict.same_bits} equal in every bit, "
        f"{verdict.checked - verdict.same_bits - verdict.wrong} within rounding, "
        f"{verdict.wrong} WRONG"
    )
    if verdict.not_checked:
        text += f"; {verdict.not_checked} could not be checked"
    if verdict.first_problem:
        text += f"\nfirst wrong answer: {verdict.first_problem}"
    return text
