"""Permission to write into reserved blocks, and its life in the pool that issued it.

    RESERVED -> FILLING -> COMMITTED
        \\________\\______> ABORTED -> RELEASED

The machine knows no clock and no socket: `now_s` comes in with the event, what is to be done goes out as commands.
An event that the table does not have for a state raises InvalidTransition and changes nothing; one that names another
boot, reservation or attempt raises StaleTicket: a late writer, not a fault of ours.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from pd_core.errors import InvalidTransition, KvrelayError, LeaseExpired, StaleTicket, TransferError
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
    """

    ref: TicketRef
    request_id: str
    first_block: int
    block_ids: list[int]
    lease_s: float
    control_host: str
    control_port: int
    addresses: list[TransportAddress]

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
    COMMITTED = "committed"  # all arrived and verified, the first token is known; the blocks belong to the request
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


class JoinBatch(msgspec.Struct, frozen=True):
    """Blocks become the request's; it may decode."""

    first_token: FirstToken


class Revoke(msgspec.Struct, frozen=True):
    """Blocks go into quarantine; the transport must stop every writer and say when none is left."""

    error: KvrelayError


class FreeBlocks(msgspec.Struct, frozen=True):
    """Quarantine is over."""


class CountCorrupt(msgspec.Struct, frozen=True):
    """A block came wrong; for the metrics."""

    index: int


TicketCommand: TypeAlias = JoinBatch | Revoke | FreeBlocks | CountCorrupt


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
    def is_over(self) -> bool:
        return self.state in (TicketState.COMMITTED, TicketState.RELEASED)

    def story(self) -> str:
        have = self.arrived.bit_count()
        return f"ticket {self.ref.ticket_id} epoch {self.ref.epoch} {self.state.value}, {have}/{self.num_blocks} blocks"

    def validate(self) -> None:
        """Raises InvalidTransition when the fields contradict each other."""
        complete = self.arrived == (1 << self.num_blocks) - 1
        if self.state is TicketState.COMMITTED and not (complete and self.first_token):
            raise InvalidTransition(f"committed before it was complete: {self.story()}")
        if self.state is TicketState.RESERVED and self.arrived:
            raise InvalidTransition(f"blocks arrived unnoticed: {self.story()}")
        if self.arrived >> self.num_blocks:
            raise InvalidTransition(f"more blocks than the range has: {self.story()}")


def issue(ref: TicketRef, num_blocks: int, lease_s: float, now_s: float) -> TicketLife:
    """A fresh ticket. The lease runs from now: a writer that never comes is silent too."""
    return TicketLife(ref=ref, num_blocks=num_blocks, lease_s=lease_s, silent_after_s=now_s + lease_s)


def step(life: TicketLife, event: TicketEvent) -> tuple[TicketLife, list[TicketCommand]]:
    """Next state and what to do about it. Raises InvalidTransition (a fault of ours) or StaleTicket (a late writer)."""
    match life.state, event:
        case _, BlockVerified() | BlockCorrupt() | LeaseRenewed() | PrefillFinished() if event.ref != life.ref:
            raise StaleTicket(f"expected epoch {life.ref.epoch} of {life.ref}, got {event.ref}")
        case TicketState.RESERVED | TicketState.FILLING, BlockVerified(index=index, now_s=now_s):
            _check_index(life, index)
            return _complete(_heard(life, now_s, arrived=life.arrived | 1 << index))
        case TicketState.RESERVED | TicketState.FILLING, BlockCorrupt(index=index, now_s=now_s):
            _check_index(life, index)
            # A second copy that comes wrong has overwritten a first that was right: the slot is empty again.
            return _heard(life, now_s, arrived=life.arrived & ~(1 << index)), [CountCorrupt(index)]
        case TicketState.RESERVED | TicketState.FILLING, LeaseRenewed(now_s=now_s):
            return _heard(life, now_s), []
        case TicketState.RESERVED | TicketState.FILLING, PrefillFinished(first_token=first, now_s=now_s):
            if life.first_token not in (None, first):
                raise StaleTicket(f"two first tokens, {life.first_token} and {first}: {life.story()}")
            return _complete(msgspec.structs.replace(_heard(life, now_s), first_token=first))
        case TicketState.RESERVED | TicketState.FILLING, TimePassed(now_s=now_s):
            if now_s < life.silent_after_s:
                return life, []
            return _abort(life, LeaseExpired(f"the writer was silent for {life.lease_s:g} s: {life.story()}"))
        case TicketState.RESERVED | TicketState.FILLING, GivenUp(error=error):
            return _abort(life, error)
        case TicketState.ABORTED, WritersGone():
            return msgspec.structs.replace(life, state=TicketState.RELEASED), [FreeBlocks()]
        case ((TicketState.ABORTED | TicketState.RELEASED | TicketState.COMMITTED), TimePassed()):
            return life, []
        case (
            (TicketState.ABORTED | TicketState.RELEASED),
            (BlockVerified() | BlockCorrupt() | LeaseRenewed() | PrefillFinished()),
        ):
            raise StaleTicket(f"too late: {life.story()}")
        case TicketState.COMMITTED, LeaseRenewed() | PrefillFinished():
            return life, []  # the writer had not heard of the commit yet
        case _:
            raise InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def _heard(life: TicketLife, now_s: float, arrived: int | None = None) -> TicketLife:
    arrived = life.arrived if arrived is None else arrived
    state = TicketState.FILLING if arrived else TicketState.RESERVED
    silent_after_s = max(life.silent_after_s, now_s + life.lease_s)
    return msgspec.structs.replace(life, state=state, arrived=arrived, silent_after_s=silent_after_s)


def _complete(life: TicketLife) -> tuple[TicketLife, list[TicketCommand]]:
    if life.first_token is None or life.missing:
        return life, []
    return msgspec.structs.replace(life, state=TicketState.COMMITTED), [JoinBatch(life.first_token)]


def _abort(life: TicketLife, error: KvrelayError) -> tuple[TicketLife, list[TicketCommand]]:
    return msgspec.structs.replace(life, state=TicketState.ABORTED), [Revoke(error)]


def _check_index(life: TicketLife, index: int) -> None:
    if not 0 <= index < life.num_blocks:
        raise TransferError(f"block {index} is outside the range: {life.story()}")
