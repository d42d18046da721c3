"""Moving whole KV blocks under a ticket. The caller does not know the path.

    prefill worker                                   decode worker
    BlockSender.push ----- blocks and digests -----> BlockReceiver -- events --> the ticket's machine

Every way to move KV implements these two; one contract test runs over all of them (tests/contract).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from pd_core.ticket import Ticket, TicketRef, TransportAddress


class BlocksArrived(msgspec.Struct, frozen=True):
    """Blocks of one frame are in their slots and have been compared with their digests, if they had any.

    verified, corrupt: indices in the ticket's range; num_bytes: KV bytes received; path: over which they came
    """

    ref: TicketRef
    verified: list[int]
    corrupt: list[int]
    num_bytes: int
    path: str


class WriterStopped(msgspec.Struct, frozen=True):
    """A connection that was writing under this ticket broke or was closed; what it had not finished is missing."""

    ref: TicketRef
    reason: str


ReceiverEvent: TypeAlias = BlocksArrived | WriterStopped


class PushReceipt(msgspec.Struct, frozen=True):
    """What one push put on the wire. `seconds` is the time on the path, without waiting for a turn."""

    path: str
    num_bytes: int
    seconds: float


class BlockReceiver(Protocol):
    """The receiving side of one pool. Its methods belong to the event loop that started it."""

    @property
    def addresses(self) -> list[TransportAddress]:
        """Where writers can reach it, for tickets."""
        ...

    @property
    def most_frame_blocks(self) -> int | None:
        """For tickets: most blocks that one frame may have, where the pool sets a limit."""
        ...

    async def start(self) -> None: ...

    def open_ticket(self, ticket: Ticket, on_event: Callable[[ReceiverEvent], None]) -> None:
        """Lets the ticket's holder write into `ticket.block_ids`. `on_event` is called on the event loop."""
        ...

    async def close_ticket(self, ref: TicketRef) -> None:
        """Takes the permission back and returns when nothing can write into its blocks any more.

        After the return no event comes for it and no byte of its blocks changes. A writer that is inside a frame is
        cut off when the frame does not end within a short grace time: the wait is bounded.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Totals since start, by the names of `reception.COUNTER_NAMES`."""
        ...

    async def close(self) -> None: ...


class BlockSender(Protocol):
    """The sending side of one pool."""

    async def push(
        self,
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> PushReceipt:
        """Writes `block_ids[i]` of our pool to block `indices[i]` of the ticket's range.

        Returns when the bytes have left (our blocks may change again), not when they have arrived: what arrived is
        known to the receiver, who says at the end what is missing. `digests` are `block_digest` of the blocks, and none
        at all for a ticket without digests; they may be made when they are asked for (see BlockDigests), which is
        while the push runs and our blocks do not change, and by another thread.
        When a cancellation or a failure returns, whatever may still be read of our blocks counts as missing for the
        receiver, unless its digest is right: they may change again then too. Without digests it counts as missing.
        deadline_s: longest from when its turn on the wire comes. While it waits behind other pushes nothing is late:
        each of those has a deadline of its own, so the wait is bounded.
        Raises Unreachable when no address can be reached, TransferError when the connection breaks, DeadlineExceeded.
        """
        ...

    def path_to(self, incarnation: str) -> str:
        """For people: how pushes to that boot of a receiver go, and why not in a better way; empty before the first."""
        ...

    async def close(self) -> None: ...
