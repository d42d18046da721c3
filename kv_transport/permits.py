"""Who may write into which slots of one pool, and who is inside them. Pure but for its lock: no socket, no clock.

    open_permit --> OPEN --begin_frame/end_frame--> OPEN --revoke--> LEAVING --last end_frame--> (gone)
                                                      `---------- revoke, nobody inside ---------'

A frame for a ticket that is over is late, which is normal: it is dropped. One for a ticket that there never was comes
from a writer that is out of its mind, or means another boot: it is an error. The two are told apart without keeping
every ticket of the past: epochs grow.

The quarantine rule: slots may be given to the next ticket only when `revoke` was called and nobody is inside a frame
for them. And one more: a block that was once reported as verified is not written again under its ticket, so that
late duplicates can do no harm between the commit and the end of the permit.

All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pd_core.errors import InvalidTransition, ProtocolError, StaleTicket
from pd_core.ticket import TicketRef


class Writer(Protocol):
    """Somebody who writes frames, one at a time, over one path."""

    @property
    def path(self) -> str: ...

    def cut(self, reason: str) -> None:
        """Makes it leave its frame soon. From any thread, any number of times."""
        ...


class OpenFrame:
    """A writer's stay inside one ticket's slots.

    indices: of the ticket's range, in the order of the frame's blocks
    digests: of the blocks, in the same order; empty when nothing is compared
    slots:   the pool's block for each, and then where in the memory its bytes go (see landing); None when they are
             not wanted (verified already, or being written by another)
    """

    __slots__ = ("digests", "indices", "ref", "slots", "writer")

    def __init__(
        self,
        ref: TicketRef,
        writer: Writer,
        indices: Sequence[int],
        digests: Sequence[int],
        slots: Sequence[int | None],
    ) -> None:
        self.ref = ref
        self.writer = writer
        self.indices = indices
        self.digests = digests
        self.slots = slots


class _Permit:
    def __init__(self, block_ids: Sequence[int], needs_digests: bool) -> None:
        self.block_ids = list(block_ids)
        self.needs_digests = needs_digests
        self.verified: set[int] = set()
        self.claimed: set[int] = set()
        self.frames: set[OpenFrame] = set()
        self.is_revoked = False
        self.on_empty: list[Callable[[], None]] = []


class PermitTable:
    """The permits of a pool of `num_blocks` slots."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._permits: dict[TicketRef, _Permit] = {}
        self._used_slots: set[int] = set()
        self._last_epochs: dict[str, int] = {}

    @property
    def num_permits(self) -> int:
        """Permits that are open or still being left."""
        with self._lock:
            return len(self._permits)

    def refs(self) -> list[TicketRef]:
        """Tickets whose permits are open or still being left."""
        with self._lock:
            return list(self._permits)

    def open_permit(self, ref: TicketRef, block_ids: Sequence[int], *, needs_digests: bool) -> None:
        """Lets frames of `ref` into the slots, where it needs them only such that have digests.

        Raises InvalidTransition when somebody else may still write there.
        """
        with self._lock:
            if ref in self._permits:
                raise InvalidTransition(f"the permit is open already: {ref}")
            if len(set(block_ids)) != len(block_ids):
                raise InvalidTransition(f"a slot occurs twice: {ref}")
            for block_id in block_ids:
                if not 0 <= block_id < self._num_blocks:
                    raise InvalidTransition(f"slot {block_id} is outside the pool of {self._num_blocks}: {ref}")
            taken = self._used_slots.intersection(block_ids)
            if taken:
                raise InvalidTransition(f"slots {sorted(taken)} are under another permit: {ref}")
            self._used_slots.update(block_ids)
            self._permits[ref] = _Permit(block_ids, needs_digests)
            self._last_epochs[ref.incarnation] = max(ref.epoch, self._last_epochs.get(ref.incarnation, 0))

    def begin_frame(self, ref: TicketRef, indices: Sequence[int], digests: Sequence[int], writer: Writer) -> OpenFrame:
        """From here to `end_frame` the writer is inside. `digests`: one for each block, or none at all.

        Raises StaleTicket when `ref` has no open permit any more, ProtocolError when it can never have had one, for
        indices that its range does not have, and where digests are needed and do not come.
        """
        with self._lock:
            permit = self._permits.get(ref)
            if permit is None and ref.epoch > self._last_epochs.get(ref.incarnation, -1):
                raise ProtocolError(f"nobody here has issued {ref}")
            if permit is None or permit.is_revoked:
                raise StaleTicket(f"nobody waits for blocks of {ref}")
            _check_indices(indices, len(permit.block_ids))
            if permit.needs_digests and not digests:
                raise ProtocolError(f"a frame without digests, and every block is to be compared: {ref}")
            if digests and len(digests) != len(indices):
                raise ProtocolError(f"a frame of {len(indices)} blocks with {len(digests)} digests")
            unwanted = permit.verified | permit.claimed
            slots = [None if index in unwanted else permit.block_ids[index] for index in indices]
            permit.claimed.update(index for index, slot in zip(indices, slots, strict=True) if slot is not None)
            frame = OpenFrame(ref, writer, indices, digests, slots)
            permit.frames.add(frame)
            return frame

    def end_frame(self, frame: OpenFrame, verified: Iterable[int]) -> None:
        """The writer is out, and `verified` of the blocks that it was given slots for are right."""
        with self._lock:
            permit = self._permits.get(frame.ref)
            if permit is None or frame not in permit.frames:
                raise InvalidTransition(f"the frame has ended already: {frame.ref}")
            permit.frames.remove(frame)
            permit.claimed.difference_update(
                index for index, slot in zip(frame.indices, frame.slots, strict=True) if slot is not None
            )
            permit.verified.update(verified)
            callbacks = self._remove_if_left(frame.ref, permit)
        for callback in callbacks:
            callback()

    def revoke(self, ref: TicketRef, on_empty: Callable[[], None]) -> list[Writer]:
        """Lets no more frames in. Writers that are inside; `on_empty` is called once when none is left (maybe now).

        A ticket without a permit is one that everybody has left. May be called again while writers leave.
        """
        with self._lock:
            permit = self._permits.get(ref)
            if permit is None:
                callbacks, writers = [on_empty], []
            else:
                permit.is_revoked = True
                permit.on_empty.append(on_empty)
                writers = [frame.writer for frame in permit.frames]
                callbacks = self._remove_if_left(ref, permit)
        for callback in callbacks:
            callback()
        return writers

    def is_open(self, ref: TicketRef) -> bool:
        """Whether frames of `ref` are wanted."""
        with self._lock:
            permit = self._permits.get(ref)
            return permit is not None and not permit.is_revoked

    def writers_inside(self, ref: TicketRef) -> list[Writer]:
        with self._lock:
            permit = self._permits.get(ref)
            return [] if permit is None else [frame.writer for frame in permit.frames]

    def validate(self) -> None:
        """Raises InvalidTransition when the table contradicts itself."""
        with self._lock:
            slots = [slot for permit in self._permits.values() for slot in permit.block_ids]
            if sorted(slots) != sorted(self._used_slots):
                raise InvalidTransition("a slot is under two permits, or under none and yet in use")
            for ref, permit in self._permits.items():
                inside = [
                    index
                    for frame in permit.frames
                    for index, slot in zip(frame.indices, frame.slots, strict=True)
                    if slot is not None
                ]
                if sorted(inside) != sorted(permit.claimed) or permit.verified & permit.claimed:
                    raise InvalidTransition(f"two writers are in one slot: {ref}")
                if permit.is_revoked and not permit.frames:
                    raise InvalidTransition(f"everybody has left, the permit is still there: {ref}")

    def _remove_if_left(self, ref: TicketRef, permit: _Permit) -> list[Callable[[], None]]:
        if not permit.is_revoked or permit.frames:
            return []
        del self._permits[ref]
        self._used_slots.difference_update(permit.block_ids)
        return permit.on_empty


def _check_indices(indices: Sequence[int], num_blocks: int) -> None:
    if not indices:
        raise ProtocolError("a frame without blocks")
    if len(set(indices)) != len(indices):
        raise ProtocolError("a frame names a block twice")
    if min(indices) < 0 or max(indices) >= num_blocks:
        raise ProtocolError(f"a frame names block {max(indices)} or {min(indices)} of a range of {num_blocks}")
