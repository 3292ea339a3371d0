"""The slab keeps to its capacity, hands no held byte out twice, and obeys no stale name."""

import ctypes
import mmap
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qlinear_service.config import size_class
from qlinear_service.errors import ConfigError, Overloaded
from qlinear_service.slots import KEPT_WHEN_IDLE_BYTES, Slab, Slot

KIB = 1024


def test_a_slot_is_the_next_power_of_two_from_one_kib() -> None:
    slab = Slab(capacity_bytes=64 * KIB, largest_bytes=16 * KIB)
    sizes = {n: len(slab.view(slab.acquire(n))) for n in (0, 1, 1024, 1025, 4097, 16384)}
    assert sizes == {0: 1024, 1: 1024, 1024: 1024, 1025: 2048, 4097: 8192, 16384: 16384}
    assert slab.used_bytes == sum(sizes.values())


def test_full_is_overloaded_with_a_time_and_a_release_makes_room() -> None:
    slab = Slab(capacity_bytes=4 * KIB, largest_bytes=4 * KIB)
    held = [slab.acquire(1024) for _ in range(4)]
    with pytest.raises(
        Overloaded, match="4096 of 4096 bytes and this call needs 1024 in"
    ) as refused:
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


def test_pieces_are_joined_for_other_classes() -> None:
    slab = Slab(capacity_bytes=16 * KIB, largest_bytes=16 * KIB)
    for slot in [slab.acquire(1024) for _ in range(16)]:
        slab.release(slot)
    large = slab.acquire(16 * KIB)
    with pytest.raises(Overloaded):
        slab.acquire(1)
    slab.release(large)
    again = [slab.acquire(1024) for _ in range(16)]
    for number, slot in enumerate(again):
        slab.view(slot)[:] = bytes([number]) * 1024
    assert [slab.view(slot)[1023] for slot in again] == list(range(16))


def test_free_bytes_in_two_places_are_no_slot() -> None:
    slab = Slab(capacity_bytes=4 * KIB, largest_bytes=2 * KIB)
    held = [slab.acquire(1024) for _ in range(4)]
    for place in (0, 3):
        slab.release(next(slot for slot in held if slot.index == place))
    with pytest.raises(Overloaded, match="2048 of 4096 bytes and this call needs 2048 in one"):
        slab.acquire(2048)
    slab.release(next(slot for slot in held if slot.index == 1))
    assert slab.acquire(2048).index == 0


def test_a_capacity_that_is_no_power_of_two_is_used_up() -> None:
    slab = Slab(capacity_bytes=11 * KIB + 5, largest_bytes=4 * KIB)
    sizes = [4, 4, 2, 1]
    assert [len(slab.view(slab.acquire(size * KIB))) for size in sizes] == [s * KIB for s in sizes]
    with pytest.raises(Overloaded):
        slab.acquire(1)


def test_slots_lie_where_their_addresses_say() -> None:
    slab = Slab(capacity_bytes=64 * KIB, largest_bytes=16 * KIB)
    first, second = slab.acquire(3000), slab.acquire(10)
    slab.view(second)[:4] = b"here"
    assert ctypes.string_at(slab.address_of(second), 4) == b"here"
    assert slab.address_of(first) % 4096 == slab.address % 4096 == 0
    slab.release(second)
    with pytest.raises(RuntimeError, match="stale"):
        slab.address_of(second)
    with pytest.raises(RuntimeError, match="stale"):
        slab.room_for_result(second, 1)


def test_results_have_room_where_nobody_else_reads() -> None:
    slab = Slab(capacity_bytes=64 * KIB, largest_bytes=16 * KIB)
    own, shared = slab.acquire(3000), slab.acquire(3000, users=2)
    assert slab.room_for_result(own, 4096)
    assert not slab.room_for_result(own, 4097)
    assert not slab.room_for_result(shared, 1)
    slab.release(shared)
    assert slab.room_for_result(shared, 1)


def test_address_space_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"address space .*smaller --max-queue-bytes"):
        Slab(capacity_bytes=1 << 60, largest_bytes=1 << 20)


class SlabMachine(RuleBasedStateMachine):
    """Any order of acquire and release: contents stay, sums fit."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(capacity_bytes=32 * KIB, largest_bytes=8 * KIB)
        self.held: list[tuple[Slot, int, int]] = []
        self.counter = 0

    @rule(nbytes=st.integers(0, 8 * KIB), users=st.integers(1, 2))
    def acquire(self, nbytes: int, users: int) -> None:
        size = size_class(nbytes)
        try:
            slot = self.slab.acquire(nbytes, users=users)
        except Overloaded:
            assert not any(self.is_free(begin, size) for begin in range(0, 32 * KIB, size))
            return
        assert (slot.index * KIB) % size == 0
        self.counter = (self.counter + 1) % 256
        view = self.slab.view(slot)
        view[:] = bytes([self.counter]) * len(view)
        self.held += [(slot, self.counter, len(view))] * users

    def is_free(self, begin: int, size: int) -> bool:
        ends = [(slot.index * KIB, slot.index * KIB + held) for slot, _, held in self.held]
        return all(end <= begin or begin + size <= start for start, end in ends)

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 1 << 20))
    def release(self, choice: int) -> None:
        slot, mark, size = self.held.pop(choice % len(self.held))
        assert bytes(self.slab.view(slot)) == bytes([mark]) * size
        self.slab.release(slot)

    @invariant()
    def sums_fit(self) -> None:
        assert self.slab.used_bytes == sum({slot: size for slot, _, size in self.held}.values())
        assert self.slab.used_bytes <= self.slab.touched_bytes <= 32 * KIB


TestSlabMachine = SlabMachine.TestCase


def resident(slab: Slab, begin: int, end: int) -> int:
    """Bytes of the slab that are in memory, as the kernel counts them."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (end - begin) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    place = ctypes.c_void_p(slab.address + begin)
    assert libc.mincore(place, ctypes.c_size_t(end - begin), found) == 0
    return sum(flag & 1 for flag in found) * mmap.PAGESIZE


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_burst_of_large_calls_is_given_back_when_all_have_left(is_pinned: bool) -> None:
    slab = Slab(capacity_bytes=160 << 20, largest_bytes=32 << 20)
    if is_pinned:
        slab.pin()
    slots = [slab.acquire(16 << 20) for _ in range(9)]
    for slot in slots:
        slab.view(slot)[:: mmap.PAGESIZE] = b"x" * len(slab.view(slot)[:: mmap.PAGESIZE])
    small = slab.acquire(1000)
    for slot in slots:
        slab.release(slot)
    assert slab.touched_bytes >= 9 << 24
    assert resident(slab, 0, 144 << 20) == 144 << 20
    slab.release(small)
    assert slab.used_bytes == 0
    assert slab.touched_bytes == (160 << 20 if is_pinned else KEPT_WHEN_IDLE_BYTES)
    left = resident(slab, KEPT_WHEN_IDLE_BYTES, 144 << 20)
    assert left == (80 << 20 if is_pinned else 0)
    again = [slab.acquire(16 << 20) for _ in range(9)]
    assert sorted(slot.index for slot in again)[-1] < 160 << 10


def test_no_child_shares_pages_that_a_device_knows() -> None:
    slab = Slab(capacity_bytes=1 << 20, largest_bytes=1 << 20)

    def flags() -> set[str]:
        parts = Path("/proc/self/smaps").read_text().split(f"{slab.address:x}-")[1]
        line = next(line for line in parts.splitlines() if line.startswith("VmFlags:"))
        return set(line.split()[1:])

    assert "dc" not in flags()
    slab.pin()
    assert "dc" in flags()
