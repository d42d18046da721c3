"""What prefill workers say to the worker that issued their ticket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from pd_core.errors import ProtocolError, TransferError
from pd_core.messages import AbandonPrefill, AllSent, FinishPrefill, HandoffVerdict, LeaseHeld, RenewLease
from pd_core.request import GenerateRequest
from pd_core.ticket import FirstToken, TicketRef
from pd_rpc.server import CallContext, Handler
from pd_worker.incoming import IncomingHandoff

FindHandoff = Callable[[TicketRef], IncomingHandoff]
"""Raises StaleTicket when nobody waits for it."""
RequestOf = Callable[[str, int], GenerateRequest | None]
"""The request by its id and attempt, as long as it is here."""


class HandoffCalls:
    """Finds the ticket that is spoken of, and feeds it what was said."""

    def __init__(self, find: FindHandoff, request_of: RequestOf, vocab_size: int) -> None:
        self._find = find
        self._request_of = request_of
        self._vocab_size = vocab_size

    @property
    def handlers(self) -> Mapping[type[msgspec.Struct], Handler]:
        return {
            RenewLease: self._renew_lease,
            FinishPrefill: self._finish_prefill,
            AllSent: self._all_sent,
            AbandonPrefill: self._abandon_prefill,
        }

    async def _renew_lease(self, body: RenewLease, _: CallContext) -> AsyncIterator[LeaseHeld]:
        handoff = self._find(body.ref)
        handoff.renew()
        yield LeaseHeld(handoff.num_arrived)

    async def _finish_prefill(self, body: FinishPrefill, _: CallContext) -> AsyncIterator[HandoffVerdict]:
        handoff = self._find(body.ref)
        self._check_first_token(handoff, body.first_token)
        yield HandoffVerdict(await handoff.finish(body.first_token))

    async def _all_sent(self, body: AllSent, _: CallContext) -> AsyncIterator[LeaseHeld]:
        self._find(body.ref).all_sent()
        yield LeaseHeld()

    async def _abandon_prefill(self, body: AbandonPrefill, _: CallContext) -> AsyncIterator[LeaseHeld]:
        self._find(body.ref).give_up(TransferError(f"the prefill worker gave up: {body.reason}"))
        yield LeaseHeld()

    def _check_first_token(self, handoff: IncomingHandoff, first: FirstToken) -> None:
        """Raises ProtocolError, and the handoff has failed, for a first token that its request cannot have."""
        request = self._request_of(handoff.ticket.request_id, handoff.ticket.ref.attempt)
        if request is None:
            return  # it is over, or has been preempted since: the ticket's machine knows the word it was told before
        if first.index == request.first_index and 0 <= first.token < self._vocab_size:
            return
        error = ProtocolError(f"the prefill's token is {first}; index {request.first_index} was to come")
        handoff.give_up(error)
        raise error
