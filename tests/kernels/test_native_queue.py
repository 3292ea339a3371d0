"""The native queue decides as `WorkQueue` does, which is its specification: random traces of both.

One clock for both, handed in. Whatever the one answers to any question the other must answer.
"""

import ctypes
import random
import struct
import subprocess
from collections.abc import Sequence

import pytest

from qlinear_service.batching import BatchKey, WorkItem, WorkQueue
from qlinear_service.cost import TILE_EDGES, CostCurve, Steps
from qlinear_service.dispatch.abi import Descriptor, ItemPart, declared, limits_of
from qlinear_service.dtypes import DType
from qlinear_service.errors import DeadlineExceeded
from qlinear_service.kernels.ninja import SOURCE_ROOT, find_compiler
from qlinear_service.scheduling import Pace, pace_of
from qlinear_service.slots import Slot

LAYERS = ("a", "b", "c", "d")
MOST_ROWS = 64
CAPACITY = 4096

Parts = list[tuple[int, int, int]]


def pace(draw: random.Random) -> Pace:
    """Costs that begin flat and end steep, as those of a device do, with bumps."""
    flat, per_row = draw.uniform(1e-5, 2e-3), draw.uniform(1e-7, 2e-4)
    seconds = [max(flat, per_row * m) * draw.uniform(1, 1.2) for m in TILE_EDGES]
    steps = tuple(Steps(m, 0.0, cost, 0.0) for m, cost in zip(TILE_EDGES, seconds, strict=True))
    return pace_of(CostCurve(steps=steps), MOST_ROWS, batch_seconds=draw.choice([1e-6, 1e-4]))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The queue alone: it needs neither kernels nor threads."""
    built = tmp_path_factory.mktemp("queue") / "libqueue.so"
    names = ("pace", "shares", "waiting", "expiries", "queue", "queue_entries")
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    sources = [str(SOURCE_ROOT / f"dispatch/{name}.cpp") for name in names]
    words = [find_compiler(), *flags, f"-I{SOURCE_ROOT}", *sources, "-o", str(built)]
    subprocess.run(words, check=True)
    return declared(ctypes.CDLL(str(built)))


class Both:
    """The two queues side by side."""

    def __init__(
        self, library: ctypes.CDLL, draw: random.Random, *, wait: float = 0.0, age: float = 1.0
    ) -> None:
        self.library = library
        self.draw, self.now, self.sequence = draw, 1000.0, 0
        paces = {name: pace(draw) for name in LAYERS if draw.random() < 0.8}
        self.python = WorkQueue(
            max_batch_rows=MOST_ROWS,
            max_queue_rows=1 << 30,
            max_age_seconds=age,
            paces=paces,
            max_wait_seconds=wait,
        )
        limits = limits_of(
            LAYERS, paces, max_batch_rows=MOST_ROWS, max_age_seconds=age, max_wait_seconds=wait
        )
        self.native = self.library.ql_queue_new(limits)
        self.items: dict[int, WorkItem] = {}
        self.parts = (ItemPart * CAPACITY)()

    def admit(self, calls: Sequence[str], **more: object) -> None:
        items, packed = [], b""
        x_dtype = self.draw.choice([DType.F16, DType.F16, DType.F32])
        rows = int(more.pop("rows"))  # type: ignore[call-overload]
        client, deadline = str(more.pop("client")), more.pop("deadline")
        priority = int(more.pop("priority"))  # type: ignore[call-overload]
        for name in calls:
            self.sequence += 1
            item = WorkItem(
                sequence=self.sequence, key=BatchKey(name, x_dtype, DType.F16), rows=rows,
                slot=Slot(0, 0), nbytes=0, enqueued_at=self.now, deadline=deadline,  # type: ignore[arg-type]
                priority=priority, client=client,
            )  # fmt: skip
            items.append(item)
            self.items[self.sequence] = item
            packed += struct.pack(
                Descriptor.FORMAT, self.sequence, 0, int(client), self.now,
                float("inf") if deadline is None else deadline, 0, LAYERS.index(name), rows, 0,
                priority, x_dtype, DType.F16, 0,
            )  # fmt: skip
        expiry = self.python.admit(items)
        assert self.library.ql_queue_admit(self.native, packed, len(items)) == expiry

    def taken(self, count: int) -> Parts:
        return [(part.sequence, part.start, part.rows) for part in self.parts[:count]]

    def take(self) -> Parts:
        batch = self.python.take(self.now)
        count = self.library.ql_queue_take(self.native, self.now, CAPACITY, self.parts)
        expected = (
            [] if batch is None else [(p.item.sequence, p.start, p.rows) for p in batch.parts]
        )
        assert self.taken(count) == expected
        return expected

    def take_together(self) -> None:
        by_key: dict[BatchKey, list[WorkItem]] = {}
        for item in self.items.values():
            by_key.setdefault(item.key, []).append(item)
        chosen = self.draw.choice(list(by_key.values()))
        items = self.draw.sample(chosen, min(len(chosen), self.draw.randint(1, 4)))
        batch = self.python.take_together(items)
        sequences = (ctypes.c_uint64 * len(items))(*(item.sequence for item in items))
        count = self.library.ql_queue_take_together(self.native, sequences, len(items), self.parts)
        expected = (
            [] if batch is None else [(p.item.sequence, p.start, p.rows) for p in batch.parts]
        )
        assert self.taken(count) == expected

    def expire(self) -> None:
        gone = (ctypes.c_uint64 * CAPACITY)()
        late = (ctypes.c_uint8 * CAPACITY)()
        count = self.library.ql_queue_expire(self.native, self.now, CAPACITY, gone, late)
        expected = [
            (dropped.item.sequence, isinstance(dropped.error, DeadlineExceeded))
            for dropped in self.python.expire(self.now)
        ]
        assert list(zip(gone[:count], map(bool, late[:count]), strict=True)) == expected

    def cancel(self) -> None:
        item = self.draw.choice(list(self.items.values()))
        begun = self.library.ql_queue_has_begun(self.native, item.sequence)
        assert bool(begun) == self.python.has_begun(item)
        self.python.cancel(item)
        self.library.ql_queue_cancel(self.native, item.sequence)

    def compare(self) -> None:
        assert self.library.ql_queue_rows(self.native) == self.python.rows
        expiry = self.python.next_expiry()
        found = self.library.ql_queue_next_expiry(self.native)
        assert found == (float("inf") if expiry is None else expiry)
        if self.python.rows:
            wait_end = self.library.ql_queue_wait_end(self.native, self.now)
            assert wait_end == self.python.wait_end(self.now)

    def step(self, clients: int) -> None:
        draw = self.draw
        self.now += draw.choice([0.0, 1e-6, 1e-4, 1e-3, 0.02, 0.2]) * draw.random()
        what = draw.random()
        if what < 0.55:
            deadline = self.now + draw.uniform(0, 0.3) if draw.random() < 0.3 else None
            self.admit(
                draw.sample(LAYERS, draw.choice([1, 1, 1, 2, 3])),
                rows=draw.choice([1, 1, 1, 2, 5, 30, 200]),
                client=draw.randrange(clients),
                deadline=deadline,
                priority=draw.choice([0, 0, 0, 1, 9]),
            )
        elif what < 0.85:
            self.expire()
            self.take()
        elif not self.items:
            return
        elif what < 0.92:
            self.take_together()
        else:
            self.cancel()
        self.compare()

    def close(self) -> None:
        self.library.ql_queue_free(self.native)


@pytest.mark.parametrize("clients", [1, 5, 600])
@pytest.mark.parametrize("wait", [0.0, 2e-4])
@pytest.mark.parametrize("seed", range(6))
def test_both_decide_the_same(library: ctypes.CDLL, clients: int, wait: float, seed: int) -> None:
    draw = random.Random(f"{clients} {wait} {seed}")
    both = Both(library, draw, wait=wait, age=draw.choice([0.05, 1.0, 30.0]))
    for _ in range(2500):
        both.step(clients)
    while both.take():
        both.compare()
    both.close()


def test_long_queues_of_greedy_clients_are_drained_in_the_same_order(
    library: ctypes.CDLL,
) -> None:
    """Thousands wait, so places are ranked, forgotten and ranked again."""
    draw = random.Random(7)
    both = Both(library, draw, age=30.0)
    for number in range(4000):
        both.admit(
            [LAYERS[number % 3]],
            rows=draw.choice([1, 1, 150]),
            client=0 if number % 4 else number % 7,
            deadline=None,
            priority=int(number % 50 == 0),
        )
    batches = 0
    while both.take():
        both.now += draw.random() * 1e-2
        batches += 1
        both.expire()
        both.compare()
    both.close()
    assert batches > 500
