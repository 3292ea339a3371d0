"""The JSON document at /now.json, field by field; docs/operations.md shows one.

Numbers carry their unit in their names; rates and means are of the last `window_seconds`. None
stands where nothing happened or nothing was measured. Types only.
"""

from typing import Literal, TypedDict

__all__ = [
    "FORMAT",
    "Answer",
    "Answers",
    "Calls",
    "Facts",
    "Layer",
    "Level",
    "Machine",
    "Now",
    "Part",
    "Queue",
    "Rows",
    "Shape",
    "TimeOfCall",
    "Trend",
]

FORMAT = 1
"""Grows when a field changes its meaning or goes; new fields do not count."""

Level = Literal["good", "fair", "bad", "idle"]
"""idle: no traffic to judge by."""


class Answer(TypedDict):
    """An answer in words."""

    level: Level
    headline: str
    text: str


class Answers(TypedDict):
    """The three questions of an operator."""

    healthy: Answer
    machine: Answer
    time: Answer


class Calls(TypedDict):
    """Finished calls; one for several layers counts once for each, as in the metrics."""

    per_second: float
    failed_per_second: float
    failed_ratio: float
    p50_seconds: float | None
    p99_seconds: float | None
    rows_per_second: float


class Part(TypedDict):
    """One stop of a call and the mean time there."""

    name: str
    """queue, copies, kernel, reply or rest."""
    seconds: float


class TimeOfCall(TypedDict):
    """Where a call's time goes, on average; `rest` is what no stop accounts for."""

    mean_seconds: float | None
    parts: list[Part]


class Queue(TypedDict):
    """What waits, and what was turned away."""

    rows: int
    bytes: int
    limit_bytes: int
    rejected_per_second: dict[str, float]
    expired_per_second: float
    cancelled_per_second: float


class Machine(TypedDict):
    """What the device does, and what it was measured to be able to at start."""

    busy_ratio: float
    bytes_per_second: float | None
    """Effective memory bandwidth while computing."""
    roofline_ratio: float | None
    peak_bytes_per_second: float | None
    large_bytes_per_second: float | None
    """Of the largest size that was read: no cache holds it."""
    peak_products_per_second: float | None
    gauges: dict[str, float]
    """What a GPU says of itself, by the metrics' names without "qlinear_gpu_"."""


class Rows(TypedDict):
    """Batches of one shape with up to `m` rows, and more than the next smaller `m`."""

    m: str
    batches_per_second: float
    rows_per_second: float
    mean_seconds: float
    bytes_per_second: float
    tuned_bytes_per_second: float | None
    products_per_byte: float
    products_per_second: float
    roofline_ratio: float | None
    busy_ratio: float


class Shape(TypedDict):
    """What layers of one shape do together."""

    shape: str
    layers: int
    packed_bytes: int
    calls_per_second: float
    p50_seconds: float | None
    p99_seconds: float | None
    queue_seconds: float | None
    kernel_seconds: float | None
    batch_rows: float | None
    batch_calls: float | None
    sweet_spot_rows: int | None
    capacity_rows_per_second: float | None
    bytes_per_second: float | None
    roofline_ratio: float | None
    busy_ratio: float
    rows: list[Rows]


class Layer(TypedDict):
    """One layer."""

    name: str
    """Shortened in its middle if it is very long."""
    shape: str
    packed_bytes: int
    rows_waiting: int
    calls_per_second: float


class Trend(TypedDict):
    """The last minutes, oldest first, a value for each step."""

    step_seconds: float
    calls_per_second: list[float | None]
    failed_per_second: list[float | None]
    p50_seconds: list[float | None]
    p99_seconds: list[float | None]
    busy_ratio: list[float | None]


class Facts(TypedDict):
    """The numbers of it."""

    format: int
    version: str
    device: str
    kernels: str
    state: str
    uptime_seconds: float
    window_seconds: float
    calls: Calls
    time: TimeOfCall
    queue: Queue
    machine: Machine
    shapes: list[Shape]
    """The busiest first."""
    shapes_left_out: int
    layers: list[Layer]
    """Those with calls first, in the order of the model."""
    layers_total: int
    packed_bytes: int
    trend: Trend


class Now(Facts):
    """All of it."""

    answers: Answers
    notes: list[Answer]
    """What else to know, worst first."""
