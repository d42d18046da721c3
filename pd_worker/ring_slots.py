"""Who has which slot of a ring of host memory between a device's pool and the transports. Pure: no thread, no clock.

         lent               copy began              copy ended
    FREE -----> LENT ---------------------> COPYING -----------> LENT
     ^           |                             |
     |-----------' given back                  | given back
     `---------------------- LEFT <------------'
            copy ended

Outward: lent, copied out of the device, read by a transport, given back. Inward: lent, written by a transport, copied
onto the device and given back at the same moment. A slot that is given back while a copy reads or writes it is free
only when that copy has ended, and until then its block is `busy`.

Slots are lent in the order in which they were asked for, all that somebody asked for at once: nobody who has some waits
for more, and nobody is passed by.
An event that the table does not have for a state raises InvalidTransition and changes nothing.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from pd_core.errors import InvalidTransition


class SlotState(enum.Enum):
    FREE = "free"
    LENT = "lent"  # its borrower, or a transport on its behalf, reads or writes it
    COPYING = "copying"  # the device reads or writes it, and its borrower waits for that
    LEFT = "left"  # the device still reads or writes it; nobody waits for that


class SlotEvent(enum.Enum):
    COPY_BEGAN = "copy began"
    COPY_ENDED = "copy ended"
    GIVEN_BACK = "given back"


class Loan(msgspec.Struct, frozen=True):
    """slots[i] is for the i-th of the blocks that `borrower` asked for."""

    borrower: int
    slots: list[int]


class RingSlots:
    """The slots of one ring. Methods that may free slots return the loans that become possible by it, in order."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise InvalidTransition(f"a ring of {num_slots} slots")
        self._states = [SlotState.FREE] * num_slots
        self._blocks: list[int | None] = [None] * num_slots
        self._free = deque(range(num_slots))
        self._waiting: deque[tuple[int, list[int]]] = deque()

    @property
    def num_slots(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Borrowers that have no slots yet."""
        return len(self._waiting)

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def block_of(self, slot: int) -> int:
        """The block that the slot was lent for. Raises InvalidTransition for a free slot."""
        block_id = self._blocks[slot]
        if block_id is None:
            raise InvalidTransition(f"slot {slot} is lent to nobody")
        return block_id

    def busy(self) -> Counter[int]:
        """Blocks that the device reads or writes, and by how many copies: none of them may be given to anybody."""
        copied = (SlotState.COPYING, SlotState.LEFT)
        pairs = zip(self._states, self._blocks, strict=True)
        return Counter(block_id for state, block_id in pairs if state in copied and block_id is not None)

    def ask(self, borrower: int, block_ids: Sequence[int]) -> list[Loan]:
        """Asks for one slot for each block. Raises InvalidTransition for more than there are, or when it waits."""
        if not 1 <= len(block_ids) <= self.num_slots:
            raise InvalidTransition(f"borrower {borrower} asks for {len(block_ids)} of {self.num_slots} slots")
        if any(waiting == borrower for waiting, _ in self._waiting):
            raise InvalidTransition(f"borrower {borrower} waits already")
        self._waiting.append((borrower, list(block_ids)))
        return self._lend()

    def withdraw(self, borrower: int) -> list[Loan]:
        """It waits no longer. Raises InvalidTransition when it does not wait."""
        for place, (waiting, _) in enumerate(self._waiting):
            if waiting == borrower:
                del self._waiting[place]
                return self._lend()
        raise InvalidTransition(f"borrower {borrower} does not wait")

    def copy_began(self, slots: Sequence[int]) -> None:
        """The device reads or writes these slots and their blocks."""
        self._step(slots, SlotEvent.COPY_BEGAN)

    def copy_ended(self, slots: Sequence[int]) -> list[Loan]:
        """It does not any more."""
        return self._step(slots, SlotEvent.COPY_ENDED)

    def give_back(self, slots: Sequence[int]) -> list[Loan]:
        """Their borrower needs them no more; those in a copy are free when it has ended."""
        return self._step(slots, SlotEvent.GIVEN_BACK)

    def validate(self) -> None:
        """Raises InvalidTransition when the ring contradicts itself."""
        free = [slot for slot, state in enumerate(self._states) if state is SlotState.FREE]
        if sorted(self._free) != free:
            raise InvalidTransition("a free slot is not on the list, or one on the list is not free")
        if any((self._blocks[slot] is None) != (slot in free) for slot in range(self.num_slots)):
            raise InvalidTransition("a slot is lent without a block, or has one and is free")
        if self._waiting and len(self._waiting[0][1]) <= len(free):
            raise InvalidTransition("the first who waits could have its slots")

    def _lend(self) -> list[Loan]:
        loans = []
        while self._waiting and len(self._waiting[0][1]) <= len(self._free):
            borrower, block_ids = self._waiting.popleft()
            slots = [self._free.popleft() for _ in block_ids]
            for slot, block_id in zip(slots, block_ids, strict=True):
                self._states[slot], self._blocks[slot] = SlotState.LENT, block_id
            loans.append(Loan(borrower, slots))
        return loans

    def _step(self, slots: Sequence[int], event: SlotEvent) -> list[Loan]:
        after = [_next(slot, self._states[slot], event) for slot in slots]  # raises before anything has changed
        if len(set(slots)) != len(slots):
            raise InvalidTransition(f"a slot occurs twice: {list(slots)}")
        for slot, state in zip(slots, after, strict=True):
            self._states[slot] = state
            if state is SlotState.FREE:
                self._blocks[slot] = None
                self._free.append(slot)
        return self._lend()


def _next(slot: int, state: SlotState, event: SlotEvent) -> SlotState:
    match state, event:
        case SlotState.LENT, SlotEvent.COPY_BEGAN:
            return SlotState.COPYING
        case SlotState.LENT, SlotEvent.GIVEN_BACK:
            return SlotState.FREE
        case SlotState.COPYING, SlotEvent.COPY_ENDED:
            return SlotState.LENT
        case SlotState.COPYING, SlotEvent.GIVEN_BACK:
            return SlotState.LEFT
        case SlotState.LEFT, SlotEvent.COPY_ENDED:
            return SlotState.FREE
        case _:
            raise InvalidTransition(f"slot {slot} is {state.value}: {event.value} does not fit")
