"""Where the room for one more block comes from. Pure: facts in, one step out; the tier takes it and asks again.

The quota counts everything in the tier's folder. Room is made in this order: a free slot; a larger set; a larger set at
the price of the oldest other set, of another fingerprint or version; the slot of a block of our own.
"""

from __future__ import annotations

import msgspec

from kv_store.slot_format import HEADER_BYTES, PAGE_BYTES, set_bytes

EXTENT_BYTES = 16
"""File systems note in blocks of their own where the pieces of a file lie; at worst each slot is a piece."""


class OtherSet(msgspec.Struct, frozen=True):
    """A set in the same folder that is not ours. `used_s`: when somebody last had it open (Unix time)."""

    name: str
    num_bytes: int
    used_s: float


class Quarters(msgspec.Struct, frozen=True):
    """What the folder holds beside our set. `stranger_bytes`: files that are none of ours; they are never removed."""

    other_sets: tuple[OtherSet, ...] = ()
    stranger_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.stranger_bytes + sum(other.num_bytes for other in self.other_sets)

    @property
    def oldest(self) -> OtherSet | None:
        return min(self.other_sets, key=lambda other: (other.used_s, other.name), default=None)

    def without(self, name: str) -> Quarters:
        return Quarters(tuple(other for other in self.other_sets if other.name != name), self.stranger_bytes)


class Room(msgspec.Struct, frozen=True):
    """The facts.

    can_grow:     False while the disk has no room for more of us, whatever the quota says
    step_slots:   by how many slots a set grows at once
    """

    num_slots: int
    num_free: int
    slot_bytes: int
    quota_bytes: int
    quarters: Quarters
    can_grow: bool
    step_slots: int


class UseFreeSlot(msgspec.Struct, frozen=True):
    """There is one."""


class Grow(msgspec.Struct, frozen=True):
    """The set shall have `num_slots` slots."""

    num_slots: int


class Shrink(msgspec.Struct, frozen=True):
    """The set shall have `num_slots` slots, fewer than it has."""

    num_slots: int


class EvictSet(msgspec.Struct, frozen=True):
    """Another set goes, whole."""

    name: str


class EvictBlock(msgspec.Struct, frozen=True):
    """A block of our own goes, if the policy names one."""


class NoRoom(msgspec.Struct, frozen=True):
    """There is none for any block."""

    reason: str


RoomStep = UseFreeSlot | Grow | EvictSet | EvictBlock | NoRoom


def footprint_bytes(num_slots: int, slot_bytes: int) -> int:
    """What a set takes of the quota: its files, and what the file system needs to find its slots."""
    return set_bytes(num_slots, slot_bytes) + num_slots * EXTENT_BYTES


def slots_within(quota_bytes: int, taken_bytes: int, slot_bytes: int) -> int:
    """The most slots a set may have where `taken_bytes` of the quota are others'."""
    return max(0, (quota_bytes - taken_bytes - PAGE_BYTES) // (slot_bytes + HEADER_BYTES + EXTENT_BYTES))


def next_step(room: Room) -> RoomStep:
    """How to come to a slot for one block."""
    if room.num_free:
        return UseFreeSlot()
    growth = growth_step(room)
    if growth is not None:
        return growth
    if room.num_slots:
        return EvictBlock()
    if not room.can_grow:
        return NoRoom("the disk has no room for a single block")
    taken = f"{room.quarters.stranger_bytes} of them taken by files that are not ours"
    return NoRoom(f"a quota of {room.quota_bytes} bytes, {taken}, has no room for a block of {room.slot_bytes} bytes")


def growth_step(room: Room) -> Grow | EvictSet | None:
    """The next step towards more slots; None where the set is as large as it may be."""
    if not room.can_grow:
        return None
    quarters = room.quarters
    wanted = room.num_slots + 1
    if wanted > slots_within(room.quota_bytes, quarters.stranger_bytes, room.slot_bytes):
        return None
    most = slots_within(room.quota_bytes, quarters.num_bytes, room.slot_bytes)
    if most >= wanted:
        return Grow(min(most, room.num_slots + room.step_slots))
    return EvictSet(quarters.oldest.name) if quarters.oldest is not None else None


def over_quota(num_slots: int, slot_bytes: int, quota_bytes: int, quarters: Quarters) -> EvictSet | Shrink | None:
    """What is to go at a start that finds more than the quota allows: the oldest other set, else slots of our own; None
    when all is well, or nothing is left to go."""
    if quarters.num_bytes + footprint_bytes(num_slots, slot_bytes) <= quota_bytes:
        return None
    if quarters.oldest is not None:
        return EvictSet(quarters.oldest.name)
    most = slots_within(quota_bytes, quarters.stranger_bytes, slot_bytes)
    return Shrink(most) if most < num_slots else None
