"""The queue alone, on a clock of plain numbers: what enters, what leaves, in which order."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_curves import FLAT, LINEAR

from qlinear_service.batching import Batch, BatchKey, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.errors import DeadlineExceeded, Overloaded
from qlinear_service.scheduling import Pace, pace_of, unmeasured
from qlinear_service.slots import Slot

A = BatchKey("m/a", DType.F16, DType.F16)
B = BatchKey("m/b", DType.F16, DType.F16)
counter = itertools.count(1)


def item(key: BatchKey = A, rows: int = 1, at: float = 0.0, **more: Any) -> WorkItem:
    return WorkItem(
        sequence=next(counter),
        key=key,
        rows=rows,
        slot=Slot(0, 0),
        nbytes=rows,
        enqueued_at=at,
        **more,
    )


def make_queue(*, batch: int = 8, rows: int = 1000, age: float = 5.0) -> WorkQueue:
    return WorkQueue(max_batch_rows=batch, max_queue_rows=rows, max_age_seconds=age)


def shape(batch: Batch | None) -> list[tuple[WorkItem, int, int]]:
    assert batch is not None
    return [(part.item, part.start, part.rows) for part in batch.parts]


def test_an_empty_queue_gives_nothing() -> None:
    queue = make_queue()
    assert queue.take(0.0) is None
    assert queue.next_expiry() is None
    assert queue.expire(1e9) == []


def test_takes_all_of_the_oldest_key_as_far_as_it_fits() -> None:
    queue = make_queue(batch=8)
    first, other, second, third = item(rows=3), item(B), item(rows=5), item(rows=1)
    queue.admit([first, other, second, third])
    assert queue.rows == 10
    batch = queue.take(0.0)
    assert shape(batch) == [(first, 0, 3), (second, 0, 5)]
    assert batch is not None
    assert (batch.key, batch.rows) == (A, 8)
    # A was served and goes to the end of the line.
    assert shape(queue.take(0.0)) == [(other, 0, 1)]
    assert shape(queue.take(0.0)) == [(third, 0, 1)]
    assert queue.take(0.0) is None
    assert queue.rows == 0


@pytest.mark.parametrize(
    "other",
    [
        BatchKey("m/b", DType.F16, DType.F16),
        BatchKey("m/a", DType.BF16, DType.F16),
        BatchKey("m/a", DType.F16, DType.F32),
    ],
)
def test_layer_and_both_dtypes_are_the_key(other: BatchKey) -> None:
    queue = make_queue()
    queue.admit([item(A), item(other)])
    first, second = queue.take(0.0), queue.take(0.0)
    assert first is not None
    assert second is not None
    assert {first.key, second.key} == {A, other}


def test_what_fits_a_batch_is_never_cut() -> None:
    queue = make_queue(batch=8)
    first, second = item(rows=5), item(rows=4)
    queue.admit([first, second])
    assert shape(queue.take(0.0)) == [(first, 0, 5)]
    assert shape(queue.take(0.0)) == [(second, 0, 4)]


def test_what_exceeds_a_batch_is_cut_by_rows_and_small_calls_overtake_it() -> None:
    queue = make_queue(batch=8)
    small, huge, tail = item(rows=2), item(rows=19), item(rows=3)
    queue.admit([small, huge, tail])
    assert shape(queue.take(0.0)) == [(small, 0, 2), (huge, 0, 6)]
    assert queue.rows == 16
    assert shape(queue.take(0.0)) == [(tail, 0, 3), (huge, 6, 5)]
    assert shape(queue.take(0.0)) == [(huge, 11, 8)]
    assert queue.take(0.0) is None
    assert queue.rows == 0


def test_a_huge_item_does_not_hold_up_other_keys() -> None:
    queue = make_queue(batch=8)
    huge, other = item(rows=80), item(B)
    queue.admit([huge, other])
    assert shape(queue.take(0.0)) == [(huge, 0, 8)]
    assert shape(queue.take(0.0)) == [(other, 0, 1)]


def test_the_urgent_go_first_between_keys_and_within_one() -> None:
    queue = make_queue(batch=2)
    a_low, a_high = item(A), item(A, priority=3)
    b_mid, a_higher = item(B, priority=2), item(A, priority=9)
    queue.admit([a_low, a_high, b_mid, a_higher])
    assert shape(queue.take(0.0)) == [(a_higher, 0, 1), (a_high, 0, 1)]
    assert shape(queue.take(0.0)) == [(b_mid, 0, 1)]
    assert shape(queue.take(0.0)) == [(a_low, 0, 1)]


def test_admission_is_by_rows_all_or_nothing() -> None:
    queue = make_queue(rows=10)
    queue.admit([item(rows=6), item(B, rows=3)])
    with pytest.raises(Overloaded, match="9 rows wait and this call brings 2; at most 10") as full:
        queue.admit([item(rows=1), item(rows=1)])
    assert full.value.retry_after_seconds > 0
    assert queue.rows == 9
    queue.check_room(1)
    queue.admit([item(rows=1)])
    # Rows that were taken make room at once, those of a part of an item too.
    queue.take(0.0)
    queue.check_room(7)


def test_the_deadline_drops_at_its_moment_and_not_before() -> None:
    queue = make_queue(age=100)
    late, fine = item(rows=2, deadline=3.0), item(deadline=4.0)
    queue.admit([fine, late])
    assert queue.next_expiry() == 3.0
    assert queue.expire(2.999) == []
    (dropped,) = queue.expire(3.0)
    assert dropped.item is late
    assert isinstance(dropped.error, DeadlineExceeded)
    assert "'m/a'" in str(dropped.error)
    assert queue.rows == 1
    assert shape(queue.take(0.0)) == [(fine, 0, 1)]
    assert queue.expire(1e9) == []


def test_age_drops_what_never_ran_and_says_come_again() -> None:
    queue = make_queue(age=5)
    queue.admit([item(at=1.0)])
    assert queue.next_expiry() == 6.0
    (dropped,) = queue.expire(6.5)
    assert isinstance(dropped.error, Overloaded)
    assert "waited 5.500 s" in str(dropped.error)
    assert "(5 s)" in str(dropped.error)
    assert queue.take(0.0) is None


def test_age_spares_what_has_begun_but_its_deadline_does_not() -> None:
    queue = make_queue(batch=8, age=5)
    endless, bounded = item(rows=20), item(B, rows=20, deadline=9.0)
    queue.admit([endless, bounded])
    queue.take(0.0)
    queue.take(0.0)
    assert queue.expire(6.0) == []
    assert queue.next_expiry() == 9.0
    (dropped,) = queue.expire(9.0)
    assert dropped.item is bounded
    assert isinstance(dropped.error, DeadlineExceeded)
    assert queue.rows == 12
    assert shape(queue.take(0.0)) == [(endless, 8, 8)]


def test_cancel_takes_out_what_has_not_begun() -> None:
    queue = make_queue(batch=8)
    huge, whole, other = item(B, rows=20), item(rows=2), item(rows=1)
    queue.admit([huge, whole, other])
    queue.take(0.0)
    queue.cancel(huge)
    queue.cancel(whole)
    assert huge not in queue
    assert other in queue
    assert queue.rows == 1
    assert shape(queue.take(0.0)) == [(other, 0, 1)]
    # Twice, or after it ran: nothing happens.
    queue.cancel(whole)
    queue.cancel(other)
    assert queue.rows == 0
    assert queue.next_expiry() is None


def test_when_all_have_waited_long_clients_still_take_turns() -> None:
    """One client's calls are all older than the other's: it gets every fourth batch for that."""
    queue = make_queue(batch=1, age=10)
    old = [item(at=0.0, client="old") for _ in range(40)]
    other = [item(B, at=1.0, client="other") for _ in range(8)]
    queue.admit(old)
    queue.admit(other)
    queue._shares.enter("old").charge(1.0)
    taken = [shape(queue.take(9.0))[0][0] for _ in range(12)]
    assert sum(one.client == "other" for one in taken) >= 8


def test_a_call_that_is_not_cut_is_taken_whole_even_where_fewer_rows_were_cheaper() -> None:
    dear = Pace(
        sweet_rows=1,
        chunk_rows=8,
        most_rows=8,
        row_seconds=1.0,
        sizes=((1, 1.0), (8, 100.0)),
        seconds=lambda rows: 1.0 if rows == 1 else 100.0,
    )
    queue = WorkQueue(
        max_batch_rows=8, max_queue_rows=60, max_age_seconds=10, paces={A.layer: dear}
    )
    whole, lone = item(rows=8), item()
    queue.admit([whole, lone])
    assert shape(queue.take(0.0)) == [(whole, 0, 8)]
    assert shape(queue.take(0.0)) == [(lone, 0, 1)]


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("admit"),
            st.sampled_from((A, B)),
            st.integers(1, 30),
            st.integers(0, 2),
            st.one_of(st.none(), st.integers(1, 20)),
        ),
        st.just(("take",)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.just(("tick",)),
    ),
    max_size=60,
)


PACES = {A.layer: pace_of(LINEAR, 8), B.layer: pace_of(FLAT, 8)}


@pytest.mark.parametrize("paces", [{}, PACES], ids=["unmeasured", "measured"])
@given(steps)
def test_every_row_leaves_exactly_once(
    paces: dict[str, Pace], steps: list[tuple[Any, ...]]
) -> None:
    """Taken rows, dropped and cancelled ones add up; the count of waiting rows is always right."""
    queue = WorkQueue(max_batch_rows=8, max_queue_rows=60, max_age_seconds=10, paces=paces)
    now = 0.0
    left: dict[WorkItem, int] = {}  # rows that must still be in the queue
    taken: dict[WorkItem, int] = {}
    admitted: list[WorkItem] = []
    for step in [*steps, *[("take",)] * 80]:
        if step[0] == "admit":
            _, key, rows, priority, wait = step
            deadline = None if wait is None else now + wait
            new = item(key, rows, now, priority=priority, deadline=deadline)
            if sum(left.values()) + rows > 60:
                with pytest.raises(Overloaded):
                    queue.admit([new])
                continue
            queue.admit([new])
            left[new], taken[new] = rows, 0
            admitted.append(new)
        elif step[0] == "cancel" and admitted:
            victim = admitted[step[1] % len(admitted)]
            queue.cancel(victim)
            left.pop(victim, None)
        elif step[0] == "tick":
            now += 1
        for dropped in queue.expire(now):
            del left[dropped.item]
        assert queue.rows == sum(left.values())
        if step[0] == "take" and (batch := queue.take(now)) is not None:
            assert 1 <= batch.rows <= 8
            for part in batch.parts:
                assert part.item.key == batch.key
                assert part.item.deadline is None or part.item.deadline > now
                assert part.start == taken[part.item]
                # Only large calls are cut.
                pace = paces.get(part.item.key.layer, unmeasured(8))
                assert part.rows == part.item.rows or part.item.rows > pace.chunk_rows
                taken[part.item] += part.rows
                left[part.item] -= part.rows
                if left[part.item] == 0:
                    del left[part.item]
    assert left == {}
    assert queue.rows == 0
