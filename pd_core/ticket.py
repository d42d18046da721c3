"""Permission to write into reserved blocks, and its life in the pool that issued it.

    RESERVED -> FILLING -> SEALING -> COMMITTED
        \\________\\__________\\____> ABORTED -> RELEASED

The machine knows no clock and no socket: `now_s` comes in with the event, what is to be done goes out as commands.
An event that the table does not have for a state raises InvalidTransition and changes nothing; one that names another
boot, reservation or attempt raises StaleTicket: a late writer, not a fault of ours.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from pd_core.errors import DigestMismatch, InvalidTransition, KvrelayError, LeaseExpired, StaleTicket
from pd_core.request import FinishReason


class TransportAddress(msgspec.Struct, frozen=True):
    """Where a pool can be written to over one path ("tcp", "inproc")."""

    path: str
    host: str
    port: int


class TicketRef(msgspec.Struct, frozen=True):
    """Names one ticket among all that there ever were; every frame about it carries this.

    incarnation: the boot of the worker whose pool it is
    epoch:       the reservation
    attempt:     the router's count of placements of the request
    """

    ticket_id: str
    incarnation: str
    epoch: int
    attempt: int


class Ticket(msgspec.Struct, frozen=True):
    """What the writer gets. Block i of the range is block `first_block + i` of the sequence.

    block_ids:    slots in the issuing pool, one for each block of the range
    lease_s:      how long the writer may be silent
    control_host, control_port: where the issuing worker takes lease renewals and the end of the prefill
    addresses:    ways to write, best first
    most_frame_blocks: most blocks that one frame may have, and so one push; None where the pool sets no limit
    with_digests: whether every block must come with its digest, with which its copy is compared
    """

    ref: TicketRef
    request_id: str
    first_block: int
    block_ids: list[int]
    lease_s: float
    control_host: str
    control_port: int
    addresses: list[TransportAddress]
    with_digests: bool = True
    most_frame_blocks: int | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


class FirstToken(msgspec.Struct, frozen=True):
    """The token that prefill drew; decode goes on after it."""

    token: int
    index: int
    finish: FinishReason | None = None


class TicketState(enum.Enum):
    RESERVED = "reserved"  # blocks set aside, nothing has arrived
    FILLING = "filling"  # at least one block has arrived
    SEALING = "sealing"  # all arrived and verified, the first token is known; writers may still be inside the blocks
    COMMITTED = "committed"  # and nothing can write any more: the blocks belong to the request
    ABORTED = "aborted"  # given up; writers may still be inside the blocks
    RELEASED = "released"  # nothing can write any more; the blocks are free


class BlockVerified(msgspec.Struct, frozen=True):
    """Block `index` of the range is in its slot and its digest is right."""

    ref: TicketRef
    index: int
    now_s: float


class BlockCorrupt(msgspec.Struct, frozen=True):
    """Block `index` came with other bytes than its digest says; its slot counts as empty."""

    ref: TicketRef
    index: int
    now_s: float


class LeaseRenewed(msgspec.Struct, frozen=True):
    """The writer is alive."""

    ref: TicketRef
    now_s: float


class PrefillFinished(msgspec.Struct, frozen=True):
    """The writer has sent every block and drawn the first token. Comes again after blocks were sent again."""

    ref: TicketRef
    first_token: FirstToken
    now_s: float


class TimePassed(msgspec.Struct, frozen=True):
    """Time went by; the lease may have run out."""

    now_s: float


class GivenUp(msgspec.Struct, frozen=True):
    """The request was cancelled, or the writer said that it failed."""

    error: KvrelayError


class WritersGone(msgspec.Struct, frozen=True):
    """The transport vouches that nothing can write into the blocks any more."""


TicketEvent: TypeAlias = (
    BlockVerified | BlockCorrupt | LeaseRenewed | PrefillFinished | TimePassed | GivenUp | WritersGone
)


class Seal(msgspec.Struct, frozen=True):
    """Everything is there; the transport must let no writer in any more and say when none is left."""


class JoinBatch(msgspec.Struct, frozen=True):
    """Blocks become the request's; it may decode."""

    first_token: FirstToken


class Revoke(msgspec.Struct, frozen=True):
    """Blocks go into quarantine; the transport must stop every writer and say when none is left.

    Where it has been told so already (`Seal`), what it says then is what is waited for.
    """

    error: KvrelayError


class FreeBlocks(msgspec.Struct, frozen=True):
    """Quarantine is over."""


class CountCorrupt(msgspec.Struct, frozen=True):
    """A block came wrong; for the metrics."""

    index: int


TicketCommand: TypeAlias = Seal | JoinBatch | Revoke | FreeBlocks | CountCorrupt


class TicketLife(msgspec.Struct, frozen=True):
    """A ticket and how far it has come.

    arrived:  bit i is set when block i is in its slot and verified
    silent_after_s: the moment at which the lease runs out unless the writer is heard
    """

    ref: TicketRef
    num_blocks: int
    lease_s: float
    silent_after_s: float
    state: TicketState = TicketState.RESERVED
    arrived: int = 0
    first_token: FirstToken | None = None

    @property
    def missing(self) -> list[int]:
        """Indices that have not arrived yet."""
        return [index for index in range(self.num_blocks) if not self.arrived >> index & 1]

    @property
    def is_open(self) -> bool:
        """Whether the handoff may still succeed or fail."""
        return self.state in (TicketState.RESERVED, TicketState.FILLING, TicketState.SEALING)

    @property
    def is_over(self) -> bool:
        return self.state in (TicketState.COMMITTED, TicketState.RELEASED)

    def story(self) -> str:
        have = self.arrived.bit_count()
        return f"ticket {self.ref.ticket_id} epoch {self.ref.epoch} {self.state.value}, {have}/{self.num_blocks} blocks"

    def validate(self) -> None:
        """Raises InvalidTransition when the fields contradict each other."""
        complete = self.arrived == (1 << self.num_blocks) - 1
        sealed = self.state in (TicketState.SEALING, TicketState.COMMITTED)
        if sealed and not (complete and self.first_token):
            raise InvalidTransition(f"sealed before it was complete: {self.story()}")
        if self.state in (TicketState.RESERVED, TicketState.FILLING) and complete and self.first_token:
            raise InvalidTransition(f"complete and not sealed: {self.story()}")
        if self.state is TicketState.RESERVED and self.arrived:
            raise InvalidTransition(f"blocks arrived unnoticed: {self.story()}")
        if self.arrived >> self.num_blocks:
            raise InvalidTransition(f"more blocks than the range has: {self.story()}")


def issue(ref: TicketRef, num_blocks: int, lease_s: float, now_s: float) -> TicketLife:
    """A fresh ticket. The lease runs from now: a writer that never comes is silent too."""
    return TicketLife(ref=ref, num_blocks=num_blocks, lease_s=lease_s, silent_after_s=now_s + lease_s)


def step(life: TicketLife, event: TicketEvent) -> tuple[TicketLife, list[TicketCommand]]:
    """Next state and what to do about it. Raises InvalidTransition (a fault of ours) or StaleTicket (a late writer)."""
    match event:
        case BlockVerified() | BlockCorrupt() | LeaseRenewed() | PrefillFinished() if event.ref != life.ref:
            raise StaleTicket(f"expected epoch {life.ref.epoch} of {life.ref}, got {event.ref}")
    match life.state:
        case TicketState.RESERVED | TicketState.FILLING:
            return _while_filling(life, event)
        case TicketState.SEALING:
            return _while_sealing(life, event)
        case _:
            return _when_decided(life, event)


def _while_filling(life: TicketLife, event: TicketEvent) -> tuple[TicketLife, list[TicketCommand]]:
    match event:
        case BlockVerified(index=index, now_s=now_s):
            _check_index(life, index)
            return _complete(_heard(life, now_s, arrived=life.arrived | 1 << index))
        case BlockCorrupt(index=index, now_s=now_s):
            _check_index(life, index)
            # A second copy that comes wrong has overwritten a first that was right: the slot is empty again.
            return _heard(life, now_s, arrived=life.arrived & ~(1 << index)), [CountCorrupt(index)]
        case LeaseRenewed(now_s=now_s):
            return _heard(life, now_s), []
        case PrefillFinished(first_token=first, now_s=now_s):
            _check_first_token(life, first)
            return _complete(msgspec.structs.replace(_heard(life, now_s), first_token=first))
        case TimePassed(now_s=now_s):
            if now_s < life.silent_after_s:
                return life, []
            return _abort(life, LeaseExpired(f"the writer was silent for {life.lease_s:g} s: {life.story()}"))
        case GivenUp(error=error):
            return _abort(life, error)
        case WritersGone():
            raise _misfit(life, event)


def _while_sealing(life: TicketLife, event: TicketEvent) -> tuple[TicketLife, list[TicketCommand]]:
    match event:
        case WritersGone() if life.first_token is not None:
            return msgspec.structs.replace(life, state=TicketState.COMMITTED), [JoinBatch(life.first_token)]
        case BlockVerified(index=index):
            _check_index(life, index)
            return life, []  # a copy of what is there
        case BlockCorrupt(index=index):
            _check_index(life, index)
            # The copy of a writer that was late overwrote what had been verified.
            aborted, commands = _abort(life, DigestMismatch(f"a late copy of block {index} came wrong: {life.story()}"))
            return aborted, [CountCorrupt(index), *commands]
        case PrefillFinished(first_token=first):
            _check_first_token(life, first)
            return life, []
        case LeaseRenewed() | TimePassed():
            return life, []  # the writer need not be heard any more
        case GivenUp(error=error):
            return _abort(life, error)
        case _:
            raise _misfit(life, event)


def _when_decided(life: TicketLife, event: TicketEvent) -> tuple[TicketLife, list[TicketCommand]]:
    match life.state, event:
        case _, TimePassed():
            return life, []
        case TicketState.COMMITTED, LeaseRenewed():
            return life, []  # the writer had not heard of the commit yet
        case TicketState.COMMITTED, PrefillFinished(first_token=first):
            _check_first_token(life, first)
            return life, []
        case TicketState.ABORTED, WritersGone():
            return msgspec.structs.replace(life, state=TicketState.RELEASED), [FreeBlocks()]
        case TicketState.ABORTED | TicketState.RELEASED, GivenUp():
            return life, []  # several can give up at once
        case (
            (TicketState.ABORTED | TicketState.RELEASED),
            (BlockVerified() | BlockCorrupt() | LeaseRenewed() | PrefillFinished()),
        ):
            raise StaleTicket(f"too late: {life.story()}")
        case _:
            raise _misfit(life, event)


def _misfit(life: TicketLife, event: TicketEvent) -> InvalidTransition:
    return InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def _heard(life: TicketLife, now_s: float, arrived: int | None = None) -> TicketLife:
    arrived = life.arrived if arrived is None else arrived
    state = TicketState.FILLING if arrived else TicketState.RESERVED
    silent_after_s = max(life.silent_after_s, now_s + life.lease_s)
    return msgspec.structs.replace(life, state=state, arrived=arrived, silent_after_s=silent_after_s)


def _complete(life: TicketLife) -> tuple[TicketLife, list[TicketCommand]]:
    if life.first_token is None or life.missing:
        return life, []
    return msgspec.structs.replace(life, state=TicketState.SEALING), [Seal()]


def _abort(life: TicketLife, error: KvrelayError) -> tuple[TicketLife, list[TicketCommand]]:
    return msgspec.structs.replace(life, state=TicketState.ABORTED), [Revoke(error)]


def _check_index(life: TicketLife, index: int) -> None:
    if not 0 <= index < life.num_blocks:
        raise InvalidTransition(f"block {index} is outside the range: {life.story()}")


def _check_first_token(life: TicketLife, first: FirstToken) -> None:
    if life.first_token not in (None, first):
        raise StaleTicket(f"two first tokens, {life.first_token} and {first}: {life.story()}")
