"""What `qlinear load` shows while it runs and says at the end."""

import asyncio
import io
import json

from rich.console import Console
from virtual_time import VirtualLoop, run_virtually

from qlinear_service.loadgen.progress import milliseconds, show_progress
from qlinear_service.loadgen.report import Facts, as_json, print_report
from qlinear_service.loadgen.samples import Verdict
from qlinear_service.loadgen.tally import Answer, Tally, Window
from qlinear_service.loadgen.traffic import Request

ONE = Request("[red]m/a", 2, "float16", 0)
OPEN = Facts(
    target="127.0.0.1:1",
    server_version="1",
    device="cpu",
    transport="unary",
    loop="open",
    concurrency=None,
    rate_per_second=50.0,
    max_in_flight=7,
    seed=3,
    warmup_seconds=1.0,
    seconds=4.0,
    interrupted=True,
)


def filled() -> Tally:
    """Of the window from 1 to 5 s: 3 answered, 1 failed, 1 under way, 1 left out."""
    tally = Tally(Window(1.0, 5.0))
    ends = [("early", 0.5, 0.6), (None, 1.0, 1.01), (None, 2.0, 2.02), (None, 3.0, 5.5)]
    for code, begun, ended in ends:
        tally.note_sent(ONE, begun, late=begun == 2.0)
        tally.note_end(ONE, begun, ended, Answer(code=code, nbytes=100))
    tally.note_sent(ONE, 4.0)
    tally.note_end(ONE, 4.0, 4.1, Answer(code="UNAVAILABLE"))
    tally.note_sent(ONE, 4.5)
    tally.note_not_sent(ONE, 4.6)
    tally.note_not_sent(ONE, 0.6)
    return tally


def printed(facts: Facts, tally: Tally, verdict: Verdict | None) -> str:
    out = io.StringIO()
    print_report(Console(file=out, width=200, markup=False), facts, tally, verdict)
    return out.getvalue()


def test_json_counts_what_began_in_the_window_and_rates_what_ended_in_it() -> None:
    report = json.loads(json.dumps(as_json(OPEN, filled(), None)))
    (line,) = report["series"]
    assert (line["layer"], line["rows"], line["dtype"]) == ("[red]m/a", 2, "float16")
    counts = {key: line[key] for key in ("sent", "answered", "unanswered", "late", "not_sent")}
    assert counts == {"sent": 5, "answered": 3, "unanswered": 1, "late": 1, "not_sent": 1}
    assert line["failed"] == {"UNAVAILABLE": 1}
    # Two answers of 2 rows and 100 bytes came within 4 s; the third came after the end.
    assert (line["rows_per_second"], line["bytes_per_second"]) == (1.0, 50.0)
    assert line["latency_seconds"]["max"] == 2.5
    assert report["total"] == {key: line[key] for key in report["total"]}
    assert report["check"] is None


def test_the_report_says_what_flatters_it() -> None:
    verdict = Verdict(against="x", checked=3, same_bits=1, wrong=1, not_checked=2)
    verdict.first_problem = "m/a: y[0, 1] is 2"
    text = printed(OPEN, filled(), verdict)
    assert "[red]m/a" in text  # a name is text, whatever it looks like
    assert "1 UNAVAILABLE" in text
    assert "1 calls (20.0%) went out late" in text
    assert "1 calls were due and NOT sent, because 7 were in flight" in text
    assert "1 calls were cut off" in text
    assert "1 equal in every bit, 1 within rounding, 1 WRONG; 2 could not be checked" in text
    assert "first wrong answer: m/a: y[0, 1] is 2" in text


def test_a_run_that_was_stopped_at_once_has_a_report() -> None:
    tally = Tally(Window(1.0, 5.0))
    text = printed(OPEN, tally, None)
    assert "seed 3" in text
    assert as_json(OPEN, tally, None)["total"]["latency_seconds"]["p99"] is None


def shown(terminal: bool) -> str:
    """Progress of a minute in which one call ends well and one badly, each second."""
    loop = VirtualLoop()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    tally = Tally(Window(10.0, 50.0))

    async def main() -> None:
        showing = asyncio.create_task(show_progress(tally, clock=loop.time, console=console))
        for _ in range(60):
            await asyncio.sleep(1)
            for code in (None, "UNAVAILABLE"):
                tally.note_sent(ONE, loop.time())
                tally.note_end(ONE, loop.time(), loop.time() + 0.25, Answer(code=code))
        showing.cancel()
        await asyncio.wait([showing])

    run_virtually(main(), loop)
    return out.getvalue()


def test_progress_where_lines_pile_up_comes_now_and_then() -> None:
    lines = shown(terminal=False).splitlines()
    assert 10 <= len(lines) <= 12
    assert lines[0].startswith("warm-up, 5 s left")
    assert any(line.startswith("20 of 40 s  1 calls/s  p50 250 p99 250 ms") for line in lines)
    assert "waiting for the last answers" in lines[-1]
    assert lines[3].endswith("failed 20 UNAVAILABLE") or lines[3].endswith("failed 19 UNAVAILABLE")


def test_progress_on_a_terminal_is_one_line_that_changes() -> None:
    text = shown(terminal=True)
    assert text.count("calls/s") >= 58
    assert "\x1b[2K" in text


def test_durations_for_people() -> None:
    values = [None, 0.0001234, 0.01234, 1.5]
    assert [milliseconds(value) for value in values] == ["-", "0.12", "12.3", "1500"]
