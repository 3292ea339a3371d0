"""What a pair of events costs, measured on a device that is made of two clocks."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from qlinear_service.gpu import probe

RECORD, GAP, EMPTY, READ = 0.7, 0.4, 1.1, 60.0  # microseconds of the device
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

    def launch(self, launch: SimpleNamespace, seconds: float) -> int:
        if launch.start_event is not None:
            launch.start_event.at = self.ask(RECORD, kernel=False)
        self.ask(seconds, kernel=True)
        if launch.stop_event is not None:
            launch.stop_event.at = self.ask(RECORD, kernel=False)
        return 0

    def wait(self, stream: object) -> None:
        self.now = max(self.now, self.device)
        self.waits += 1


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.at = machine, 0.0

    def query(self) -> bool:
        return self.at <= self.machine.now

    def elapsed_time(self, after: "Event") -> float:
        return (after.at - self.at) / 1e3


def measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> tuple[float, Any]:
    cuda = SimpleNamespace(Event=lambda enable_timing: Event(machine))
    torch = SimpleNamespace(cuda=cuda, empty=lambda *_, **__: None, uint8=None)
    monkeypatch.setattr(probe, "torch", torch)
    runtime = SimpleNamespace(
        launch=lambda stream, name, pair: SimpleNamespace(start_event=pair[0], stop_event=pair[1]),
        check=lambda status, name: None,
    )
    kernels: Any = SimpleNamespace(
        runtime=runtime,
        device=None,
        wait=machine.wait,
        occupy=lambda busy, stream: machine.ask(READ, kernel=True),
        library=SimpleNamespace(ql_cuda_empty=lambda launch: machine.launch(launch, EMPTY)),
    )
    return probe.pair_seconds(kernels, None) * 1e6, runtime  # type: ignore[arg-type]


@pytest.mark.parametrize("request_microseconds", [0.1, 2.0, 9.0])
def test_neither_the_host_nor_the_empty_kernel_is_in_it(
    request_microseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(request_microseconds)
    pair, runtime = measured(machine, monkeypatch)
    # Of a product behind other work no more is left than what it takes in a row of products.
    machine.ask(READ, kernel=True)
    launch = runtime.launch(None, "linear", (Event(machine), Event(machine)))
    machine.launch(launch, KERNEL)
    shown = 1e3 * launch.start_event.elapsed_time(launch.stop_event) - pair
    assert KERNEL <= shown == pytest.approx(KERNEL + GAP)


def test_pairs_that_waited_for_a_late_host_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, _ = measured(Machine(2.0), monkeypatch)
    pair, _ = measured(Machine(2.0, prompt_every=4), monkeypatch)
    assert pair == pytest.approx(prompt)


def test_a_host_that_cannot_get_ahead_gives_the_best_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slower than the read: every pair waits for it, and the cost is at least not below zero."""
    pair, _ = measured(Machine(100.0), monkeypatch)
    assert 0.0 <= pair < 200.0
