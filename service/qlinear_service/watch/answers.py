"""An operator's three questions, answered in words.

Is it healthy, does the machine do what it can, where does the time go. Thresholds are those of
deploy/prometheus/rules/alerts.yml.
"""

from qlinear_service.watch.calls import refused_for_load
from qlinear_service.watch.document import Answer, Answers, Facts
from qlinear_service.watch.units import big, rate, seconds, share

__all__ = ["answers", "notes"]

FAILED_RATIO = 0.01
QUEUE_FULL_RATIO = 0.8
OF_TUNED_RATIO = 0.6
OF_SWEET_SPOT_RATIO = 0.5
OF_ROOFLINE_RATIO = 0.6
BUSY_RATIO = 0.75
"""A device that computes for this share of the time has hardly any room left."""

FREE_RATIO = 0.5
"""One that computes for less than this waits for others more than others for it."""

SMALL_BYTES = 1 << 20
"""Batches that read less are over before the time of starting them is made up for."""

STATES = {
    "starting": "Starting: no calls are answered yet",
    "draining": "Draining: no new calls are taken",
}
PARTS = {
    "queue": ("Waiting for a batch", "the calls wait for their turn"),
    "copies": (
        "Copying activations",
        "large calls, or a machine that is short of memory bandwidth",
    ),
    "kernel": ("Computing", "the time goes where it should"),
    "reply": ("Encoding replies", "large answers, or a machine that is short of CPU"),
    "rest": ("In front of the queue", "decoding and the event loop: the CPU, not the device"),
}


def answers(facts: Facts) -> Answers:
    """Return the three answers."""
    return Answers(healthy=_healthy(facts), machine=_machine(facts), time=_time(facts))


def _healthy(facts: Facts) -> Answer:
    calls = facts["calls"]
    failed = calls["failed_ratio"]
    text = f"{big(calls['per_second'])} calls/s · p99 {seconds(calls['p99_seconds'])}"
    if facts["state"] != "serving":
        headline = STATES.get(facts["state"], f"Not serving: {facts['state']}")
        return Answer(level="fair", headline=headline, text=text)
    if failed > FAILED_RATIO:
        return Answer(level="bad", headline=f"No: {share(failed)} of calls fail", text=text)
    if refused := refused_for_load(facts["queue"]["rejected_per_second"]):
        headline = f"Overloaded: refuses {big(refused)} calls/s"
        return Answer(level="fair", headline=headline, text=text)
    if failed:
        return Answer(level="fair", headline=f"Mostly: {share(failed)} of calls fail", text=text)
    if not calls["per_second"]:
        text = f"no calls in the last {facts['window_seconds']:.0f} s"
        return Answer(level="good", headline="Yes, and idle", text=text)
    return Answer(level="good", headline="Yes", text=f"{text} · none failed")


def _machine(facts: Facts) -> Answer:
    machine = facts["machine"]
    ratio = machine["roofline_ratio"]
    if machine["bytes_per_second"] is None:
        peak = machine["peak_bytes_per_second"]
        text = "" if peak is None else f"reads {rate(peak)} at most"
        return Answer(level="idle", headline="Nothing to judge by", text=text)
    text = f"{rate(machine['bytes_per_second'])} while busy · busy {share(machine['busy_ratio'])}"
    if machine["gauges"].get("throttled"):
        headline = "No: the GPU is clocked down"
        return Answer(level="bad", headline=headline, text=text)
    if ratio is None:
        return Answer(level="idle", headline="Not known: it was not measured", text=text)
    headline = f"{share(ratio)} of what it can"
    if ratio >= OF_ROOFLINE_RATIO and not _below_tuned(facts):
        return Answer(level="good", headline=headline, text=text)
    if _mean_bytes(facts) < SMALL_BYTES:
        text += " · layers this small take longer to start than to read"
    return Answer(level="fair", headline=headline, text=text)


def _time(facts: Facts) -> Answer:
    time = facts["time"]
    mean = time["mean_seconds"]
    total = sum(part["seconds"] for part in time["parts"])
    if mean is None or not total:
        return Answer(level="idle", headline="Nowhere: no calls", text="")
    largest = max(time["parts"], key=lambda part: part["seconds"])
    what, why = PARTS[largest["name"]]
    waits = largest["name"] == "queue" and largest["seconds"] > total / 2
    if waits:
        why = _limit(facts["machine"]["busy_ratio"])
    headline = f"{what}: {share(largest['seconds'] / total)}"
    text = f"of {seconds(mean)} a call · {why}"
    return Answer(level="fair" if waits else "good", headline=headline, text=text)


def _limit(busy_ratio: float) -> str:
    """Return who makes calls wait."""
    if busy_ratio >= BUSY_RATIO:
        return "the device is the limit"
    computes = f"the device computes {share(busy_ratio)} of the time"
    if busy_ratio < FREE_RATIO:
        return f"{computes}: the CPU in front of it is the limit"
    return f"{computes}, the CPU in front of it holds it up for the rest"


def notes(facts: Facts) -> list[Answer]:
    """Return what else to know, worst first; none if all is well."""
    found: list[Answer] = []
    queue, gauges = facts["queue"], facts["machine"]["gauges"]
    if gauges.get("throttled"):
        text = (
            f"{gauges.get('temperature_celsius', 0):.0f} °C, {gauges.get('power_watts', 0):.0f} W"
        )
        found.append(_note("bad", "Power, heat or hardware keep the clock down", text))
    if queue["limit_bytes"] and queue["bytes"] > QUEUE_FULL_RATIO * queue["limit_bytes"]:
        full = share(queue["bytes"] / queue["limit_bytes"])
        found.append(_note("fair", f"The queue is {full} full", "calls are refused next"))
    for reason, per_second in sorted(queue["rejected_per_second"].items()):
        found.append(_note("fair", f"{big(per_second)} calls/s are refused", reason))
    if queue["expired_per_second"]:
        late = f"{big(queue['expired_per_second'])} calls/s expire"
        found.append(_note("fair", late, "their deadline passes before they are answered"))
    if queue["cancelled_per_second"]:
        left = f"{big(queue['cancelled_per_second'])} calls/s are taken back"
        found.append(_note("idle", left, "by their callers"))
    for shape, m, ratio in _below_tuned(facts):
        slow = f"{shape} (m {m}) reaches {share(ratio)} of its tuned bandwidth"
        found.append(_note("fair", slow, "docs/operations.md: QlinearBandwidthBelowTuned"))
    return found


def _note(level: str, headline: str, text: str) -> Answer:
    return Answer(level=level, headline=headline, text=text)  # type: ignore[typeddict-item]


def _mean_bytes(facts: Facts) -> float:
    """Return the bytes of a batch, on average."""
    rows = [one for shape in facts["shapes"] for one in shape["rows"]]
    batches = sum(one["batches_per_second"] for one in rows)
    moved = sum(
        one["batches_per_second"] * one["mean_seconds"] * one["bytes_per_second"] for one in rows
    )
    return moved / batches if batches else 0.0


def _below_tuned(facts: Facts) -> list[tuple[str, str, float]]:
    """Return shape, m and share of what is slow although its batches are large enough."""
    found = []
    for shape in facts["shapes"]:
        spot, batch_rows = shape["sweet_spot_rows"], shape["batch_rows"]
        if not spot or not batch_rows or batch_rows < OF_SWEET_SPOT_RATIO * spot:
            continue
        for rows in shape["rows"]:
            tuned = rows["tuned_bytes_per_second"]
            if tuned and rows["bytes_per_second"] < OF_TUNED_RATIO * tuned:
                found.append((shape["shape"], rows["m"], rows["bytes_per_second"] / tuned))
    return found
