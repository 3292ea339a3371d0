"""Shares of clients and the order of what waits, against plain definitions."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlinear_service.batching import BatchKey, WorkItem
from qlinear_service.dtypes import DType
from qlinear_service.fairness import MOST_CLIENTS, QUANTUM_SECONDS, Shares
from qlinear_service.lanes import Entry, Waiting
from qlinear_service.slots import Slot

KEY = BatchKey("m/a", DType.F16, DType.F16)


def test_a_client_that_had_its_quantum_is_a_round_later() -> None:
    shares = Shares()
    share = shares.enter("a")
    share.charge(0.6 * QUANTUM_SECONDS)
    assert share.round == 0
    share.charge(0.6 * QUANTUM_SECONDS)
    assert share.round == 1
    share.charge(10 * QUANTUM_SECONDS)
    assert share.round == 11


def test_who_was_away_begins_in_the_round_of_the_others() -> None:
    shares = Shares()
    busy, idle = shares.enter("busy"), shares.enter("idle")
    shares.leave(idle)
    busy.charge(50 * QUANTUM_SECONDS)
    shares.serve(busy)
    assert shares.enter("idle").round == 50
    assert shares.enter("new").round == 50


def test_who_had_more_than_its_share_gains_nothing_by_a_pause() -> None:
    shares = Shares()
    greedy = shares.enter("greedy")
    greedy.charge(50 * QUANTUM_SECONDS)
    shares.leave(greedy)
    assert shares.enter("greedy").round == 50


def test_at_most_256_clients_are_tracked_and_the_rest_share_one() -> None:
    shares = Shares()
    tracked = [shares.enter(f"client {number}") for number in range(MOST_CLIENTS)]
    assert len(set(map(id, tracked))) == 256
    rest = {id(shares.enter(f"late {number}")) for number in range(1000)}
    assert len(rest) == 1
    assert len(shares) == 256
    # Once one has nothing waiting, its place is another's.
    shares.leave(tracked[7])
    assert id(shares.enter("next")) not in rest
    assert shares.enter("client 8") is tracked[8]
    assert len(shares) == 256


def test_who_came_back_is_not_forgotten_while_something_of_it_waits() -> None:
    shares = Shares(most=2)
    first, second = shares.enter("first"), shares.enter("second")
    shares.leave(first)
    shares.leave(second)
    assert shares.enter("first") is first
    shares.enter("third")  # takes the place of the second
    assert shares.enter("first") is first
    fourth = shares.enter("fourth")
    assert fourth.name is None
    shares.leave(first)
    shares.leave(first)
    assert shares.enter("fifth").name == "fifth"


def test_names_of_any_length_are_bounded() -> None:
    shares = Shares()
    assert shares.enter("x" * 100_000) is shares.enter("x" * 100_000)
    (name,) = shares._tracked
    assert len(name) == 128


numbers = st.integers(0, 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), numbers, numbers, st.integers(0, 5)),
        st.tuples(st.just("charge"), numbers),
        st.just(("take",)),
        st.just(("look",)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("cut"), st.integers(0, 30), st.integers(0, 5)),
    ),
    max_size=60,
)


@settings(max_examples=400)
@given(steps)
def test_the_first_is_always_that_of_a_full_comparison(steps: list[tuple[int, ...]]) -> None:
    """Whatever came, left, was cut or charged meanwhile, and whenever order was asked for."""
    shares, waiting, entries = Shares(), Waiting(), []
    sequence = itertools.count(1)
    for kind, *words in steps:
        if kind == "add":
            client, priority, due = words
            item = WorkItem(
                sequence=next(sequence), key=KEY, rows=9, slot=Slot(0, 0), nbytes=1,
                enqueued_at=0.0, priority=priority,
            )  # fmt: skip
            entries.append(Entry(item, shares.enter(str(client)), float(due)))
            waiting.add(entries[-1])
        elif kind == "charge":
            share = shares.enter(str(words[0]))
            share.charge(1.5 * QUANTUM_SECONDS)
            shares.leave(share)
        elif entries and kind == "look":
            assert waiting.first() is min(entries, key=rank)
        elif entries and kind == "cut":
            entry = entries[words[0] % len(entries)]
            if entry.rows_left > 1:
                entry.next_row += 1
                entry.due += words[1]
                entry.version += 1
                waiting.moved(entry, 1)
        elif entries:
            entry = waiting.first() if kind == "take" else entries[words[0] % len(entries)]
            if kind == "take":
                assert entry is min(entries, key=rank)
            entries.remove(entry)
            waiting.remove(entry)
            entry.is_gone = True
            shares.leave(entry.share)
        assert waiting.rows == sum(entry.rows_left for entry in entries)
        assert len(waiting) == len(entries)


def rank(entry: Entry) -> tuple[float, ...]:
    item = entry.item
    return -item.priority, entry.share.round, entry.due, item.sequence


@pytest.mark.parametrize("clients", [1, 40])
def test_ranks_of_what_left_are_not_kept_for_ever(clients: int) -> None:
    shares, waiting = Shares(), Waiting()
    held = []
    for number in range(1, 20_001):
        item = WorkItem(
            sequence=number, key=KEY, rows=1, slot=Slot(0, 0), nbytes=1, enqueued_at=0.0
        )
        entry = Entry(item, shares.enter(str(number % clients)), -float(number))
        waiting.add(entry)
        held.append(entry)
        if len(held) > 50:
            waiting.first()
            oldest = held.pop(0)
            waiting.remove(oldest)
            oldest.is_gone = True
            shares.leave(oldest.share)
    assert waiting._records <= 2 * 51 + 64
