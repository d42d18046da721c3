"""Which slot of a set holds which block.

              take_slot, replace              written                    parent is LIVE
    free slot ------------------> WRITING --------------------> WRITTEN ----------------> LIVE
        ^                            \\                             \\                     / |  \\
        |  wiped (no reader)          \\ failed, dropped             \\ dropped           /  |   `-- replace: the slot
        `--------------------------- WIPING <---------------------------------------------'  |       is WRITING again
                                                                                             begin_read, end_read

A free slot has an empty header on the disk. A block is LIVE only while its parent is, so that no order of completions,
failures and evictions ever leaves a child without its parent; dropping a block drops all that continue it.

The index knows no clock and no file. What happens on the disk is told to it after it has happened.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

import msgspec

from kv_store.slot_format import BadBytes, SlotHeader
from pd_core.errors import InvalidTransition, LedgerCorrupt


class SlotState(enum.Enum):
    WRITING = "writing"  # nothing in the slot counts
    WRITTEN = "written"  # on the disk, but its parent is not yet
    LIVE = "live"
    WIPING = "wiping"  # gone, but its header may still be on the disk


class Fate(enum.Enum):
    """What becomes of a block that somebody wants to write."""

    KNOWN = "known"  # it is there, or on its way
    NO_PARENT = "no parent"
    NEEDS_SLOT = "needs slot"


class Entry:
    """One slot that is not free. Only the index changes it.

    erases_body: the bytes go too when the slot is wiped, not the header alone
    """

    __slots__ = ("children", "erases_body", "header", "is_being_wiped", "num_readers", "slot", "state")

    def __init__(self, slot: int, header: SlotHeader, state: SlotState) -> None:
        self.slot = slot
        self.header = header
        self.state = state
        self.children: set[bytes] = set()
        self.num_readers = 0
        self.erases_body = False
        self.is_being_wiped = False


class IndexCounts(msgspec.Struct, frozen=True):
    """How many slots are in each state."""

    total: int
    free: int
    writing: int
    live: int
    wiping: int


class Rebuilt(msgspec.Struct, frozen=True):
    """An index made from headers. `num_corrupt` are no headers; `num_orphans` have no parent; `num_doubles` are older
    copies of a block. The slots of all three wait to be wiped."""

    index: SlotIndex
    live: list[SlotHeader]
    num_corrupt: int
    num_orphans: int
    num_doubles: int


_NO_HEADER = SlotHeader(b"", b"", 0, 0, 0, 0)


class SlotIndex:
    """The slots 0 .. num_slots - 1 of one set."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._next_sequence = 1
        self._free = list(range(num_slots - 1, -1, -1))
        self._blocks: dict[bytes, Entry] = {}
        self._gone: dict[int, Entry] = {}  # WIPING, or WRITING what nobody wants any more
        self._num_in_flight = 0  # WRITING and WRITTEN
        self._num_doomed = 0  # of these in `_gone`
        self._num_reading = 0

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_busy(self) -> int:
        """At most so many LIVE blocks without LIVE children cannot be evicted now."""
        return self._num_in_flight + self._num_reading

    def counts(self) -> IndexCounts:
        num_live = len(self._blocks) - (self._num_in_flight - self._num_doomed)
        num_wiping = len(self._gone) - self._num_doomed
        return IndexCounts(self._num_slots, len(self._free), self._num_in_flight, num_live, num_wiping)

    def find(self, name: bytes) -> Entry | None:
        """The block's slot, if it is LIVE."""
        entry = self._blocks.get(name)
        return entry if entry is not None and entry.state is SlotState.LIVE else None

    def live(self) -> Iterator[SlotHeader]:
        return (entry.header for entry in self._blocks.values() if entry.state is SlotState.LIVE)

    # writing

    def fate(self, name: bytes, parent: bytes, position: int) -> Fate:
        """Whether a block may be written."""
        if name in self._blocks:
            return Fate.KNOWN
        before = self._blocks.get(parent)
        fits = position == 0 or (before is not None and before.header.position == position - 1)
        return Fate.NEEDS_SLOT if fits else Fate.NO_PARENT

    def take_slot(self, block: SlotHeader) -> Entry:
        """A free slot for the block; `sequence` is filled in. Raises InvalidTransition unless it NEEDS_SLOT."""
        self._check_writable(block)
        if not self._free:
            raise InvalidTransition("no slot is free")
        return self._begin_write(self._free.pop(), block)

    def is_evictable(self, name: bytes, block: SlotHeader) -> bool:
        """Whether `block` may have the slot of `name`: nobody reads that or continues it, and `block` does not."""
        entry = self.find(name)
        continued = name == block.parent and block.position > 0
        return entry is not None and not entry.num_readers and not entry.children and not continued

    def replace(self, victim: bytes, block: SlotHeader) -> Entry:
        """The victim's slot for the block. Its old header is to be wiped before the body is written."""
        self._check_writable(block)
        if not self.is_evictable(victim, block):
            raise InvalidTransition(f"block {victim.hex()} cannot be evicted for {block.name.hex()}")
        entry = self._blocks[victim]
        self._forget(entry)
        return self._begin_write(entry.slot, block)

    def written(self, entry: Entry) -> list[SlotHeader]:
        """Body and header are on the disk. Returns what is LIVE by that, parents first."""
        self._check_state(entry, SlotState.WRITING)
        if self._gone.get(entry.slot) is entry:
            self._num_in_flight -= 1
            self._num_doomed -= 1
            entry.state = SlotState.WIPING
            return []
        entry.state = SlotState.WRITTEN
        return self._promote(entry)

    def failed(self, entry: Entry) -> None:
        """The write failed: what it left is to be wiped, and what continues it is dropped."""
        self._check_state(entry, SlotState.WRITING)
        if self._gone.get(entry.slot) is not entry:
            self._drop_all(entry)
        self._num_in_flight -= 1
        self._num_doomed -= 1
        entry.state = SlotState.WIPING

    # reading

    def begin_read(self, name: bytes) -> Entry | None:
        """The block's slot, which stays its own until `end_read`; None when it is not LIVE."""
        entry = self.find(name)
        if entry is not None:
            self._num_reading += entry.num_readers == 0
            entry.num_readers += 1
        return entry

    def end_read(self, entry: Entry) -> None:
        if entry.num_readers < 1:
            raise InvalidTransition(f"nobody reads slot {entry.slot}")
        entry.num_readers -= 1
        self._num_reading -= entry.num_readers == 0

    # going

    def drop(self, name: bytes) -> list[bytes]:
        """The block goes, and all that continue it. Returns those that were LIVE, children before parents."""
        entry = self._blocks.get(name)
        return self._drop_all(entry) if entry is not None else []

    def begin_wipe(self, most: int) -> list[Entry]:
        """Slots that nobody reads, whose headers are to be made empty; `wiped` or `wipe_failed` follows for each."""
        taken: list[Entry] = []
        for entry in self._gone.values():
            if len(taken) == most:
                break
            if entry.state is SlotState.WIPING and not entry.is_being_wiped and not entry.num_readers:
                entry.is_being_wiped = True
                taken.append(entry)
        return taken

    def going(self) -> list[Entry]:
        """What nobody finds any more, but still has its slot."""
        return list(self._gone.values())

    def has_gone(self, entry: Entry) -> bool:
        """Whether one of `going` has given up its slot, wiped."""
        return self._gone.get(entry.slot) is not entry

    def wiped(self, entry: Entry) -> None:
        """The header is empty, the slot is free."""
        self._check_being_wiped(entry)
        entry.is_being_wiped = False
        del self._gone[entry.slot]
        self._free.append(entry.slot)

    def wipe_failed(self, entry: Entry) -> None:
        self._check_being_wiped(entry)
        entry.is_being_wiped = False

    # the set

    def grow(self, num_slots: int) -> None:
        """The set has `num_slots` slots now; the new ones are free."""
        if num_slots < self._num_slots:
            raise InvalidTransition(f"{self._num_slots} slots cannot become {num_slots}")
        self._free[:0] = range(num_slots - 1, self._num_slots - 1, -1)
        self._num_slots = num_slots

    @classmethod
    def rebuild(cls, num_slots: int, found: Iterable[tuple[int, SlotHeader | BadBytes]]) -> Rebuilt:
        """From what the slots' headers say; slots that are not in `found` are empty."""
        index = cls(num_slots)
        good: list[tuple[int, SlotHeader]] = []
        num_corrupt = num_orphans = num_doubles = 0
        for slot, header in found:
            if isinstance(header, BadBytes):
                num_corrupt += 1
                index._gone[slot] = Entry(slot, _NO_HEADER, SlotState.WIPING)
            else:
                good.append((slot, header))
        newest = {header.name: header.sequence for _, header in sorted(good, key=lambda item: item[1].sequence)}
        live: list[SlotHeader] = []
        # A child is always written after its parent.
        for slot, header in sorted(good, key=lambda item: item[1].sequence):
            fate = index.fate(header.name, header.parent, header.position)
            if newest[header.name] != header.sequence or fate is Fate.KNOWN:
                num_doubles += 1
                index._gone[slot] = Entry(slot, header, SlotState.WIPING)
            elif fate is Fate.NO_PARENT:
                num_orphans += 1
                index._gone[slot] = Entry(slot, header, SlotState.WIPING)
            else:
                index._link(Entry(slot, header, SlotState.LIVE))
                live.append(header)
            index._next_sequence = header.sequence + 1
        taken = {entry.slot for entry in index._blocks.values()} | index._gone.keys()
        index._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]
        return Rebuilt(index, live, num_corrupt, num_orphans, num_doubles)

    def validate(self) -> None:
        """Raises LedgerCorrupt when a slot is in no state or in two, or a child has no parent."""
        slots = [*self._free, *self._gone, *(entry.slot for entry in self._blocks.values())]
        if sorted(slots) != list(range(self._num_slots)):
            raise LedgerCorrupt(f"{len(slots)} slots are accounted for, {self._num_slots} exist: {sorted(slots)}")
        entries = [*self._blocks.values(), *self._gone.values()]
        in_flight = sum(entry.state in (SlotState.WRITING, SlotState.WRITTEN) for entry in entries)
        reading = sum(entry.num_readers > 0 for entry in entries)
        if (in_flight, reading) != (self._num_in_flight, self._num_reading):
            raise LedgerCorrupt(
                f"{in_flight} in flight, {reading} read; counted {self._num_in_flight}, {self._num_reading}"
            )
        states = [entry.state for entry in entries]
        counted = (self.counts().live, self.counts().wiping)
        if counted != (states.count(SlotState.LIVE), states.count(SlotState.WIPING)):
            raise LedgerCorrupt(f"{counted} slots are counted as live and wiping, of {states}")
        for name, entry in self._blocks.items():
            self._validate_family(name, entry)

    def _validate_family(self, name: bytes, entry: Entry) -> None:
        header = entry.header
        if header.position > 0:
            parent = self._blocks.get(header.parent)
            if parent is None or name not in parent.children:
                raise LedgerCorrupt(f"block {name.hex()} has no parent")
            if entry.state is SlotState.LIVE and parent.state is not SlotState.LIVE:
                raise LedgerCorrupt(f"block {name.hex()} is live, its parent is not")
        if any(self._blocks[child].header.parent != name for child in entry.children):
            raise LedgerCorrupt(f"block {name.hex()} has a child of another")

    def _begin_write(self, slot: int, block: SlotHeader) -> Entry:
        header = msgspec.structs.replace(block, sequence=self._next_sequence)
        self._next_sequence += 1
        self._num_in_flight += 1
        entry = Entry(slot, header, SlotState.WRITING)
        self._link(entry)
        return entry

    def _promote(self, entry: Entry) -> list[SlotHeader]:
        live: list[SlotHeader] = []
        waiting = [entry]
        while waiting:
            at = waiting.pop()
            if at.state is SlotState.WRITTEN and self._has_live_parent(at):
                at.state = SlotState.LIVE
                self._num_in_flight -= 1
                live.append(at.header)
                waiting.extend(self._blocks[child] for child in at.children)
        return live

    def _has_live_parent(self, entry: Entry) -> bool:
        return entry.header.position == 0 or self._blocks[entry.header.parent].state is SlotState.LIVE

    def _drop_all(self, top: Entry) -> list[bytes]:
        family = [top]
        for entry in family:
            family.extend(self._blocks[child] for child in entry.children)
        live: list[bytes] = []
        for entry in reversed(family):
            self._forget(entry)
            self._gone[entry.slot] = entry
            entry.erases_body = True
            if entry.state is SlotState.LIVE:
                live.append(entry.header.name)
            self._num_in_flight -= entry.state is SlotState.WRITTEN
            self._num_doomed += entry.state is SlotState.WRITING
            if entry.state is not SlotState.WRITING:
                entry.state = SlotState.WIPING
        return live

    def _link(self, entry: Entry) -> None:
        self._blocks[entry.header.name] = entry
        if entry.header.position > 0:
            self._blocks[entry.header.parent].children.add(entry.header.name)

    def _forget(self, entry: Entry) -> None:
        del self._blocks[entry.header.name]
        if entry.header.position > 0:
            self._blocks[entry.header.parent].children.discard(entry.header.name)

    def _check_writable(self, block: SlotHeader) -> None:
        fate = self.fate(block.name, block.parent, block.position)
        if fate is not Fate.NEEDS_SLOT:
            raise InvalidTransition(f"block {block.name.hex()} is not to be written: {fate.value}")

    def _check_state(self, entry: Entry, state: SlotState) -> None:
        if entry.state is not state:
            raise InvalidTransition(f"slot {entry.slot} is {entry.state.value}, not {state.value}")

    def _check_being_wiped(self, entry: Entry) -> None:
        if not entry.is_being_wiped:
            raise InvalidTransition(f"slot {entry.slot} is not being wiped")
