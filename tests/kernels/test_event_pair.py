"""What a pair of events costs, measured on a device that is made of two clocks."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from qlinear_service.gpu import probe

RECORD, GAP, SMALL, READ = 0.7, 0.4, 5.1, 60.0  # microseconds of the device
KERNEL = 14.5


@dataclass
class Machine:
    """A host that takes its time for each request, and a device that works them off in order."""

    request: float
    now: float = 0.0
    device: float = 0.0
    prompt_every: int = 1
    """Of so many waits the requests behind one are prompt, those behind the others late."""
    waits: int = 0
    ran: bool = False
    """The request before was a kernel: the next one waits for its end."""

    def ask(self, seconds: float, *, kernel: bool) -> float:
        """Return when the device is done."""
        self.now += self.request if self.waits % self.prompt_every == 0 else 2 * READ
        self.device = max(self.device, self.now) + (GAP if self.ran else 0) + seconds
        self.ran = kernel
        return self.device

    def wait(self, stream: object) -> None:
        self.now = max(self.now, self.device)
        self.waits += 1


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.at = machine, 0.0

    def record(self, stream: "Stream") -> None:
        self.at = self.machine.ask(RECORD, kernel=False)

    def query(self) -> bool:
        return self.at <= self.machine.now

    def elapsed_time(self, after: "Event") -> float:
        return (after.at - self.at) / 1e3


class Stream:
    def wait_event(self, event: Event) -> None:
        """What waits here waits on the device."""

    def synchronize(self) -> None:
        """Nothing runs on it."""


def measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the microseconds that the cost is measured to be."""
    cuda = SimpleNamespace(
        Event=lambda enable_timing=False: Event(machine), current_stream=lambda device: Stream()
    )
    torch = SimpleNamespace(
        cuda=cuda, empty=lambda *_, **__: None, ones=lambda *_, **__: None,
        empty_like=lambda _: None, uint8=None, float16=None,
    )  # fmt: skip
    monkeypatch.setattr(probe, "torch", torch)
    monkeypatch.setattr(probe, "made_up_layer", lambda **_: object())
    kernels: Any = SimpleNamespace(
        device=None,
        wait=machine.wait,
        occupy=lambda busy, stream: machine.ask(READ, kernel=True),
        linear=lambda *_, **__: machine.ask(SMALL, kernel=True),
    )
    return probe.pair_seconds(kernels, Stream(), Stream()) * 1e6  # type: ignore[arg-type]


@pytest.mark.parametrize("request_microseconds", [0.1, 2.0, 9.0])
def test_neither_the_host_nor_the_small_product_is_in_it(
    request_microseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(request_microseconds)
    pair = measured(machine, monkeypatch)
    # Of a product behind other work no more is left than what it takes in a row of products.
    machine.ask(READ, kernel=True)
    before, after = Event(machine), Event(machine)
    before.record(Stream())
    machine.ask(KERNEL, kernel=True)
    after.record(Stream())
    assert KERNEL <= 1e3 * before.elapsed_time(after) - pair == pytest.approx(KERNEL + GAP)


def test_pairs_that_waited_for_a_late_host_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = measured(Machine(2.0), monkeypatch)
    pair = measured(Machine(2.0, prompt_every=4), monkeypatch)
    assert pair == pytest.approx(prompt)


def test_a_host_that_cannot_get_ahead_gives_the_best_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slower than the reads: every pair waits for it, and the cost is at least not below zero."""
    assert 0.0 <= measured(Machine(500.0), monkeypatch) < 1000.0
