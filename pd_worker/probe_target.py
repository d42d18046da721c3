"""Tickets for pushes that only measure. What comes is thrown away; blocks that somebody needs are never taken for it.

OpenProbe --> ticket, like any other: lease, digests, quarantine
              `--> committed: the blocks are free at once   or   aborted, quarantined, free
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from pd_core.errors import Cancelled, InvalidRequest, KvrelayError, Overloaded
from pd_core.ledger import BlockLedger
from pd_core.messages import OpenProbe, TicketGranted
from pd_core.ticket import FirstToken
from pd_rpc.server import CallContext, Handler
from pd_worker.incoming import IncomingHandoff, IncomingHandoffs, Outcome
from pd_worker.open_requests import OpenRequests

MAX_OPEN = 4
"""Tickets at once: one of a path that failed may still be in quarantine when the next path has its turn."""
MAX_PROBE_BYTES = 64 << 20
"""Of one push: running transfers wait for so much at the most."""
RETRY_AFTER_S = 1.0


def check_probe_size(num_blocks: int, block_bytes: int) -> None:
    """Raises InvalidRequest for a push that is none, or that running requests would notice."""
    most = max(1, MAX_PROBE_BYTES // block_bytes)
    if not 1 <= num_blocks <= most:
        raise InvalidRequest(f"num_blocks is {num_blocks}; it must be between 1 and {most}", param="num_blocks")


class ProbeTarget:
    """Belongs to the event loop.

    handoffs:    those of probes alone, so that they count as nobody's handoff
    num_spare:   free blocks that nobody here is about to need
    check_open:  raises why nothing new is taken now
    on_room:     called when blocks have come free
    """

    def __init__(
        self,
        ledger: BlockLedger,
        handoffs: IncomingHandoffs,
        requests: OpenRequests,
        *,
        num_spare: Callable[[], int],
        check_open: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._handoffs = handoffs
        self._requests = requests
        self._num_spare = num_spare
        self._check_open = check_open
        self._on_room = on_room
        self._open: dict[str, IncomingHandoff] = {}
        self._num_opened = 0

    @property
    def handlers(self) -> Mapping[type[msgspec.Struct], Handler]:
        return {OpenProbe: self._open_probe}

    def cut(self, error: KvrelayError) -> None:
        """Ends every probe with this error."""
        for handoff in list(self._open.values()):
            handoff.give_up(error)

    async def _open_probe(self, body: OpenProbe, _: CallContext) -> AsyncIterator[TicketGranted]:
        handoff = self._admit(body.num_blocks)
        try:
            yield TicketGranted(handoff.ticket)
        except BaseException:  # nobody has the ticket
            handoff.give_up(Cancelled("who asked for the ticket has left"))
            raise

    def _admit(self, num_blocks: int) -> IncomingHandoff:
        """Sets the blocks aside, or raises and takes nothing."""
        self._check_open()
        check_probe_size(num_blocks, self._handoffs.block_bytes)
        if len(self._open) >= MAX_OPEN:
            raise Overloaded(f"{len(self._open)} pushes of probes are under way here", retry_after_s=RETRY_AFTER_S)
        num_spare = self._num_spare()
        reservation = self._ledger.try_reserve(num_blocks) if num_blocks <= num_spare else None
        if reservation is None:
            why = f"a probe needs {num_blocks} blocks; {num_spare} are free beside the growth of what runs here"
            raise Overloaded(why, retry_after_s=RETRY_AFTER_S)
        self._num_opened += 1
        holder = f"probe-{self._num_opened}"
        self._requests.enter(holder)
        outcome = Outcome(
            committed=lambda first: self._committed(holder, first),
            failed=lambda error: None,
            released=lambda: self._forget(holder),
        )
        handoff = self._handoffs.issue(holder, 0, reservation, holder, outcome)
        self._open[holder] = handoff
        return handoff

    def _committed(self, holder: str, _: FirstToken) -> None:
        self._ledger.release(holder)
        self._handoffs.forget(self._open[holder].ticket.ref)
        self._forget(holder)

    def _forget(self, holder: str) -> None:
        self._open.pop(holder, None)
        self._requests.leave(holder)
        self._on_room()
