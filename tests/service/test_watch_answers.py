"""The answers in words: each state of a server has its own, and numbers read as people say them."""

from typing import Any

import pytest
from measured_layers import Spec
from watched_metrics import busy

from qlinear_service.watch import units
from qlinear_service.watch.answers import answers, notes
from qlinear_service.watch.history import History
from qlinear_service.watch.now import now


def document(**changes: dict[str, Any] | str) -> Any:
    """Return the document of a server that is well, with some values of its parts changed."""
    metrics = busy([Spec("up", n=16)])
    found: Any = now(metrics, History(metrics))
    found["calls"] |= {"per_second": 100.0, "p99_seconds": 0.003}
    found["machine"] |= {"roofline_ratio": 0.8, "busy_ratio": 0.5}
    found["queue"] |= {"rows": 0, "bytes": 0}
    found["time"] = {"mean_seconds": 0.01, "parts": parts(kernel=0.006, queue=0.004)}
    for name, change in changes.items():
        found[name] = found[name] | change if isinstance(change, dict) else change
    return found


def parts(**seconds: float) -> list[dict[str, Any]]:
    return [{"name": name, "seconds": value} for name, value in seconds.items()]


def said(question: str, **changes: Any) -> tuple[str, str]:
    answer = answers(document(**changes))[question]  # type: ignore[literal-required]
    return answer["level"], f"{answer['headline']} | {answer['text']}"


@pytest.mark.parametrize(
    ("level", "words", "changes"),
    [
        ("good", "Yes | 100 calls/s · p99 3 ms · none failed", {}),
        ("good", "Yes, and idle", {"calls": {"per_second": 0.0}}),
        ("fair", "Starting", {"state": "starting"}),
        ("fair", "Draining", {"state": "draining"}),
        ("bad", "No: 5.0 % of calls fail", {"calls": {"failed_ratio": 0.05}}),
        ("fair", "Mostly: 0.5 % of calls fail", {"calls": {"failed_ratio": 0.005}}),
        (
            "fair",
            "Overloaded: refuses 7 calls/s",
            {"queue": {"rejected_per_second": {"queue_rows": 7.0, "too_large": 90.0}}},
        ),
        ("good", "Yes", {"queue": {"rejected_per_second": {"too_large": 90.0}}}),
    ],
)
def test_is_it_healthy(level: str, words: str, changes: dict[str, Any]) -> None:
    found = said("healthy", **changes)
    assert found[0] == level
    assert found[1].startswith(words)


@pytest.mark.parametrize(
    ("level", "words", "changes"),
    [
        ("good", "80 % of what it can", {}),
        ("fair", "30 % of what it can", {"machine": {"roofline_ratio": 0.3}}),
        ("idle", "Nothing to judge by", {"machine": {"bytes_per_second": None}}),
        ("idle", "Not known", {"machine": {"roofline_ratio": None}}),
        ("bad", "No: the GPU is clocked down", {"machine": {"gauges": {"throttled": 1.0}}}),
        ("good", "80 %", {"machine": {"gauges": {"throttled": 0.0}}}),
    ],
)
def test_does_the_machine_do_what_it_can(level: str, words: str, changes: dict[str, Any]) -> None:
    found = said("machine", **changes)
    assert found[0] == level
    assert found[1].startswith(words)


def test_small_layers_are_named_as_the_reason_of_a_low_share_only_if_they_are_small() -> None:
    assert "small" in said("machine", machine={"roofline_ratio": 0.3})[1]
    large = document(machine={"roofline_ratio": 0.3})
    for rows in large["shapes"][0]["rows"]:
        rows["bytes_per_second"] *= 1e6
    assert "small" not in answers(large)["machine"]["text"]


@pytest.mark.parametrize(
    ("level", "words", "busy_ratio", "seconds"),
    [
        ("good", "Computing: 60 % | of 10 ms a call", 0.5, {"kernel": 0.006, "queue": 0.004}),
        ("good", "In front of the queue: 90 %", 0.5, {"kernel": 0.001, "rest": 0.009}),
        ("fair", "Waiting for a batch: 80 %", 0.5, {"kernel": 0.002, "queue": 0.008}),
        ("idle", "Nowhere: no calls", 0.5, {"kernel": 0.0}),
    ],
)
def test_where_does_the_time_go(
    level: str, words: str, busy_ratio: float, seconds: dict[str, float]
) -> None:
    time = {"mean_seconds": 0.01, "parts": parts(**seconds)}
    found = said("time", time=time, machine={"busy_ratio": busy_ratio})
    assert found[0] == level
    assert found[1].startswith(words)


def test_who_is_the_limit_depends_on_how_busy_the_device_is() -> None:
    time = {"mean_seconds": 0.01, "parts": parts(kernel=0.002, queue=0.008)}
    limits = {0.95: "the device is the limit", 0.6: "holds it up", 0.4: "front of it is the limit"}
    for busy_ratio, words in limits.items():
        assert words in said("time", time=time, machine={"busy_ratio": busy_ratio})[1]


def test_notes_tell_what_is_wrong_and_nothing_if_all_is_well() -> None:
    assert notes(document()) == []
    wrong = document(
        queue={
            "bytes": 90,
            "limit_bytes": 100,
            "rejected_per_second": {"queue_age": 2.0},
            "expired_per_second": 3.0,
            "cancelled_per_second": 4.0,
        },
        machine={"gauges": {"throttled": 1.0, "temperature_celsius": 91.0}},
    )
    found = [f"{note['headline']} {note['text']}" for note in notes(wrong)]
    assert notes(wrong)[0]["level"] == "bad"
    for words in ("91 °C", "90 % full", "2 calls/s are refused queue_age", "3 calls/s expire"):
        assert any(words in one for one in found), words
    assert "4 calls/s are taken back" in found[-1]


def test_a_shape_far_below_its_tuned_bandwidth_is_named_if_its_batches_are_large() -> None:
    slow = document()
    (shape,) = slow["shapes"]
    shape |= {"sweet_spot_rows": 16, "batch_rows": 8.0}
    shape["rows"][0]["tuned_bytes_per_second"] = 4 * shape["rows"][0]["bytes_per_second"]
    (note,) = notes(slow)
    assert note["headline"].endswith("reaches 25 % of its tuned bandwidth")
    assert answers(slow)["machine"]["level"] == "fair"
    shape["batch_rows"] = 7.0
    assert notes(slow) == []


def test_numbers_have_three_digits_and_a_unit() -> None:
    seconds = {0.0: "0 µs", 2.5e-6: "2.5 µs", 0.00099999: "1 ms", 0.01234: "12.3 ms", 61.0: "61 s"}
    assert {value: units.seconds(value) for value in seconds} == seconds
    sizes = {0: "0 B", 1023: "1023 B", 75 * 1024: "75 KiB", 3 << 30: "3 GiB"}
    assert {value: units.amount(value) for value in sizes} == sizes
    rates = {5.0: "5 B/s", 2.1e11: "210 GB/s", 4.8e12: "4.8 TB/s", None: "–"}
    assert {value: units.rate(value) for value in rates} == rates
    shares = {0.0: "0 %", 0.004: "0.4 %", 0.0996: "10 %", 1.2: "120 %", None: "–"}
    assert {value: units.share(value) for value in shares} == shares
    assert units.big(1234) == "1.23 k"
    assert units.short_name("abcdefghij", 9) == "ab…efghij"
    assert len(units.short_name("x" * 500, 160)) == 160
