"""Draws the document for a terminal, from 80 columns on; wider ones show more of the shapes.

Names come from files of anybody: what a terminal would obey is replaced, and nothing is markup.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qlinear_service.log_values import printable
from qlinear_service.watch import units
from qlinear_service.watch.fetch import Unreachable

__all__ = ["gone", "screen"]

STYLES = {"good": "bold green", "fair": "bold yellow", "bad": "bold red", "idle": "dim"}
SIGNS = {"good": "●", "fair": "▲", "bad": "✖", "idle": "○"}
STATES = {"serving": "good", "starting": "fair", "draining": "fair"}
PARTS = {"queue": "waiting", "copies": "copies", "kernel": "computing"}
PART_STYLES = {
    "queue": "yellow",
    "copies": "blue",
    "kernel": "green",
    "reply": "magenta",
    "rest": "bright_black",
}
QUESTIONS = (("Healthy?", "healthy"), ("Fast?", "machine"), ("Time?", "time"))
TRENDS = (("calls/s", "calls_per_second"), ("busy", "busy_ratio"), ("p99", "p99_seconds"))
LEVELS = "▁▂▃▄▅▆▇█"
WIDE = 110
FEWEST_ROWS = 3
UNKNOWN_HEIGHT_ROWS = 20
"""Layers and shapes that are printed where there is no screen to fill."""


def screen(document: dict[str, Any], url: str, *, width: int, height: int | None) -> Group:
    """Return what is to be printed.

    Args:
        document: of /now.json.
        url: where it came from.
        width: columns of the terminal.
        height: its lines; None prints tables in full, up to a bound.

    Raises:
        Unreachable: a field is missing, or is not what it should be.
    """
    try:
        return _screen(document, url, width, height)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise Unreachable(
            f"what answers at {url} sends a document that this qlinear cannot read; is it a server "
            "of this version?"
        ) from None


def _screen(document: dict[str, Any], url: str, width: int, height: int | None) -> Group:
    notes = document["notes"]
    top = [
        _head(document, url),
        Text(),
        _answers(document["answers"]),
        *(_answer_line(note) for note in notes),
        Text(),
        _parts(document["time"], width),
        *_trends(document["trend"], width),
        Text(),
    ]
    used = 15 + 2 * len(notes)
    free = 2 * UNKNOWN_HEIGHT_ROWS if height is None else max(height - used, 2 * FEWEST_ROWS)
    shapes, layers = document["shapes"], document["layers"]
    most_shapes = min(len(shapes), max(FEWEST_ROWS, free - FEWEST_ROWS - 3))
    most_layers = max(free - most_shapes - 3, FEWEST_ROWS)
    return Group(
        *top,
        _shapes(shapes[:most_shapes], width),
        *_more(len(shapes) - most_shapes + document["shapes_left_out"], "shapes"),
        Text(),
        _layers(layers[:most_layers], width),
        *_more(document["layers_total"] - min(most_layers, len(layers)), "layers"),
    )


def gone(document: dict[str, Any], why: str, seconds: float) -> dict[str, Any]:
    """Return the last document of a server that no longer answers, with that said first."""
    lost = {"level": "bad", "headline": f"No answer for {seconds:.0f} s", "text": why}
    return document | {
        "state": "unreachable",
        "answers": document["answers"] | {"healthy": lost},
    }


def _plain(value: object) -> str:
    return printable(str(value))


def _head(document: dict[str, Any], url: str) -> Text:
    state = _plain(document["state"])
    style = STYLES[STATES.get(state, "bad")]
    facts = [_plain(document["device"])]
    gauges = document["machine"]["gauges"]
    facts += [units.big(gauges["clock_hertz"]) + "Hz"] if gauges.get("clock_hertz") else []
    facts += [f"{gauges['power_watts']:.0f} W"] if gauges.get("power_watts") else []
    warmth = gauges.get("temperature_celsius")
    facts += [f"{warmth:.0f} °C"] if warmth else []
    queue = document["queue"]
    facts += [f"{document['layers_total']:d} layers", f"{queue['rows']:d} rows wait", _plain(url)]
    return Text.assemble(
        ("qlinear ", "bold"), (state, style), ("  " + " · ".join(facts), "dim"), no_wrap=True,
        overflow="ellipsis",
    )  # fmt: skip


def _answers(answers: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for question, name in QUESTIONS:
        table.add_row(question, _answer_line(answers[name]))
    return table


def _answer_line(answer: dict[str, Any]) -> Text:
    level = answer["level"] if answer["level"] in STYLES else "idle"
    return Text.assemble(
        (f"{SIGNS[level]} {_plain(answer['headline'])}", STYLES[level]),
        (f"  {_plain(answer['text'])}", "dim"),
    )


def _parts(time: dict[str, Any], width: int) -> RenderableType:
    """Return a bar of a call's time and, below it, what its colours mean."""
    parts = time["parts"]
    total = sum(part["seconds"] for part in parts)
    if not total or time["mean_seconds"] is None:
        return Text("no calls to take apart", style="dim")
    bar, key = Text(no_wrap=True), Text()
    done, drawn = 0.0, 0
    for part in parts:
        done += part["seconds"]
        style = PART_STYLES.get(part["name"], "white")
        end = round(done / total * min(width, WIDE))
        bar.append("█" * (end - drawn), style=style)
        drawn = end
        name = PARTS.get(part["name"], _plain(part["name"]))
        key.append("■ ", style=style)
        key.append(f"{name} {units.seconds(part['seconds'])}  ")
    return Group(bar, key)


def _trends(trend: dict[str, Any], width: int) -> Iterable[Text]:
    """Yield a line for each trend: its name, its course, its highest value."""
    shows = {"calls/s": units.big, "busy": units.share, "p99": units.seconds}
    for label, name in TRENDS:
        values = trend[name][-max(min(width, WIDE) - 30, 1) :]
        known = [value for value in values if value is not None]
        most = max(known, default=0.0)
        ceiling = max(most, 1.0) if label == "busy" else most
        line = Text(f"{label:<8}", style="dim", no_wrap=True)
        line.append("".join(_level(value, ceiling) for value in values), style="cyan")
        if known:
            line.append(f" now {shows[label](known[-1])}, most {shows[label](most)}")
        yield line


def _level(value: float | None, ceiling: float) -> str:
    if value is None or not ceiling:
        return " " if value is None else LEVELS[0]
    return LEVELS[min(int(value / ceiling * len(LEVELS)), len(LEVELS) - 1)]


def _table(columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for place, heading in enumerate(columns.split("|")):
        justify = "right" if place else "left"
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def _shapes(shapes: list[dict[str, Any]], width: int) -> Table:
    wide = width >= WIDE
    more = "|wait|kernel|rows" if wide else "|rows"
    table = _table(f"shape|calls/s|p50|p99{more}|busy|bandwidth|of floor")
    for shape in shapes:
        ratio = shape["roofline_ratio"]
        style = "" if ratio is None else STYLES["good" if ratio >= 0.6 else "fair"]
        rows = units.big(shape["batch_rows"])
        times = [units.seconds(shape[name]) for name in ("queue_seconds", "kernel_seconds")]
        if wide and shape["sweet_spot_rows"] is not None and shape["batch_rows"] is not None:
            rows += f" of {shape['sweet_spot_rows']:d}"
        table.add_row(
            Text(_plain(shape["shape"])),
            units.big(shape["calls_per_second"]),
            units.seconds(shape["p50_seconds"]),
            units.seconds(shape["p99_seconds"]),
            *([*times, rows] if wide else [rows]),
            units.share(shape["busy_ratio"]),
            units.rate(shape["bytes_per_second"]),
            Text(units.share(ratio), style=style),
            style="" if shape["busy_ratio"] else "dim",
        )
    return table


def _layers(layers: list[dict[str, Any]], width: int) -> Table:
    table = _table("layer|calls/s|waiting|memory")
    for layer in layers:
        quiet = not layer["calls_per_second"] and not layer["rows_waiting"]
        table.add_row(
            Text(_plain(units.short_name(layer["name"], max(width - 36, 20)))),
            units.big(layer["calls_per_second"]),
            f"{layer['rows_waiting']:d}",
            units.amount(layer["packed_bytes"]),
            style="dim" if quiet else "",
        )
    return table


def _more(count: int, what: str) -> list[Text]:
    return [Text(f"… and {count} more {what}", style="dim")] if count > 0 else []
