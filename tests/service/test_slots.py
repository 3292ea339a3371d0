"""The slab keeps to its capacity, hands no held byte out twice, and obeys no stale name."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qlinear_service.errors import Overloaded
from qlinear_service.slots import KEPT_WHEN_IDLE_BYTES, MAPPED_FROM_BYTES, Slab, Slot

KIB = 1024


def test_a_slot_is_the_next_power_of_two_from_one_kib() -> None:
    slab = Slab(capacity_bytes=64 * KIB, largest_bytes=16 * KIB)
    sizes = {n: len(slab.view(slab.acquire(n))) for n in (0, 1, 1024, 1025, 4097, 16384)}
    assert sizes == {0: 1024, 1: 1024, 1024: 1024, 1025: 2048, 4097: 8192, 16384: 16384}
    assert slab.used_bytes == sum(sizes.values())


def test_full_is_overloaded_with_a_time_and_a_release_makes_room() -> None:
    slab = Slab(capacity_bytes=4 * KIB, largest_bytes=4 * KIB)
    held = [slab.acquire(1024) for _ in range(4)]
    with pytest.raises(Overloaded, match="4096 of 4096 bytes and this call needs 1024") as refused:
        slab.acquire(1)
    assert refused.value.retry_after_seconds > 0
    slab.release(held[2])
    assert slab.view(slab.acquire(1))


def test_a_request_beyond_the_largest_slot_is_our_own_bug() -> None:
    slab = Slab(capacity_bytes=8 * KIB, largest_bytes=2 * KIB)
    with pytest.raises(ValueError, match="largest is 2048"):
        slab.acquire(2049)
    with pytest.raises(ValueError, match="exceeds capacity"):
        Slab(capacity_bytes=4 * KIB, largest_bytes=5 * KIB)


def test_a_stale_name_reaches_nothing() -> None:
    slab = Slab(capacity_bytes=4 * KIB, largest_bytes=KIB)
    old = slab.acquire(10)
    slab.release(old)
    new = slab.acquire(10)
    assert new.index == old.index
    assert new.generation != old.generation
    for use in (slab.release, slab.view):
        with pytest.raises(RuntimeError, match="stale"):
            use(old)
    slab.release(new)
    with pytest.raises(RuntimeError, match="stale"):
        slab.release(new)
    # The right generation of a slot that nobody holds is as stale.
    with pytest.raises(RuntimeError, match="stale"):
        slab.view(Slot(new.index, new.generation + 1))


def test_a_shared_slot_is_free_after_its_last_user() -> None:
    slab = Slab(capacity_bytes=KIB, largest_bytes=KIB)
    slot = slab.acquire(1, users=3)
    slab.release(slot)
    slab.release(slot)
    with pytest.raises(Overloaded):
        slab.acquire(1)
    slab.view(slot)[0] = 7
    slab.release(slot)
    slab.acquire(1)


def test_kept_buffers_make_way_for_other_classes() -> None:
    slab = Slab(capacity_bytes=16 * KIB, largest_bytes=16 * KIB)
    small = [slab.acquire(1024) for _ in range(16)]
    for slot in small:
        slab.release(slot)
    assert (slab.used_bytes, slab.allocated_bytes) == (0, 16 * KIB)
    large = slab.acquire(16 * KIB)
    assert slab.allocated_bytes == 16 * KIB
    slab.release(large)
    again = [slab.acquire(1024) for _ in range(16)]
    assert slab.allocated_bytes == 16 * KIB
    for number, slot in enumerate(again):
        slab.view(slot)[:] = bytes([number]) * 1024
    assert [slab.view(slot)[1023] for slot in again] == list(range(16))


def test_large_slots_are_mapped_and_writable() -> None:
    slab = Slab(capacity_bytes=4 * MAPPED_FROM_BYTES, largest_bytes=2 * MAPPED_FROM_BYTES)
    slot = slab.acquire(2 * MAPPED_FROM_BYTES)
    view = slab.view(slot)
    view[-1] = 9
    assert slab.view(slot)[-1] == 9


class SlabMachine(RuleBasedStateMachine):
    """Any order of acquire and release: contents stay, sums fit."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(capacity_bytes=32 * KIB, largest_bytes=8 * KIB)
        self.held: list[tuple[Slot, int, int]] = []
        self.counter = 0

    @rule(nbytes=st.integers(0, 8 * KIB), users=st.integers(1, 2))
    def acquire(self, nbytes: int, users: int) -> None:
        used = self.slab.used_bytes
        try:
            slot = self.slab.acquire(nbytes, users=users)
        except Overloaded:
            assert used + max(KIB, nbytes) > 32 * KIB or used + 2 * nbytes > 32 * KIB
            return
        self.counter = (self.counter + 1) % 256
        view = self.slab.view(slot)
        view[:] = bytes([self.counter]) * len(view)
        self.held += [(slot, self.counter, len(view))] * users

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 1 << 20))
    def release(self, choice: int) -> None:
        slot, mark, size = self.held.pop(choice % len(self.held))
        assert bytes(self.slab.view(slot)) == bytes([mark]) * size
        self.slab.release(slot)

    @invariant()
    def sums_fit(self) -> None:
        assert self.slab.used_bytes == sum({slot: size for slot, _, size in self.held}.values())
        assert self.slab.used_bytes <= self.slab.allocated_bytes <= 32 * KIB


TestSlabMachine = SlabMachine.TestCase


def test_a_burst_of_large_calls_is_given_back_when_all_have_left() -> None:
    slab = Slab(capacity_bytes=1 << 30, largest_bytes=32 << 20)
    slots = [slab.acquire(16 << 20) for _ in range(10)]
    small = slab.acquire(1000)
    for slot in slots:
        slab.release(slot)
    assert slab.allocated_bytes == 160 * (1 << 20) + 1024
    slab.release(small)
    assert slab.allocated_bytes <= KEPT_WHEN_IDLE_BYTES
    assert slab.used_bytes == 0
    again = slab.acquire(16 << 20)
    assert len(slab.view(again)) == 16 << 20
