"""One request on a decode worker, and its exact place in the KV."""

from __future__ import annotations

from pd_core.engine import SequenceStep
from pd_core.errors import KvrelayError
from pd_core.messages import TokenMade
from pd_core.request import GenerateRequest, finish_after
from pd_core.ticket import FirstToken
from pd_worker.incoming import IncomingHandoff
from pd_worker.outbox import Outbox


def holder_name(request_id: str, attempt: int) -> str:
    """What a placement of a request is called in the ledger."""
    return f"{request_id}/{attempt}"


class DecodeSequence:
    """A request from its reservation to its last token.

    holder:   its name in the ledger
    handoff:  how its KV comes in; set right after the reservation
    table:    its block table, set when the handoff is committed
    num_made: tokens made so far, the prefill's one among them
    """

    def __init__(self, request: GenerateRequest, attempt: int, outbox: Outbox) -> None:
        self.request = request
        self.attempt = attempt
        self.outbox = outbox
        self.holder = holder_name(request.request_id, attempt)
        self.handoff: IncomingHandoff | None = None
        self.table: list[int] = []
        self.num_made = 0
        self._last_token = 0

    @property
    def is_over(self) -> bool:
        return self.outbox.is_over

    @property
    def has_begun(self) -> bool:
        """Its KV is here, and the first token was not the last."""
        return self.num_made > 0

    def begin(self, first: FirstToken, table: list[int]) -> None:
        """The prompt's KV is in the first blocks of `table`; `first` is the token after it, whose KV is not made."""
        self.table = table
        self.take(first.token)

    def next_step(self) -> SequenceStep:
        """Runs the last token, whose KV is missing, and draws the one after it."""
        return SequenceStep(
            tokens=[self._last_token],
            start=len(self.request.tokens) + self.num_made - 1,
            block_ids=self.table,
            sample=self.request.sampling,
        )

    def take(self, token: int) -> None:
        """Sends the token on. The sequence is over after its last one, or when the router reads too slowly."""
        index = self.request.first_index + self.num_made
        self.num_made += 1
        self._last_token = token
        finish = finish_after(self.request, token, self.num_made)
        error = self.outbox.try_put(TokenMade(index, token, finish))
        if error is not None or finish is not None:
            self.end(error)

    def end(self, error: KvrelayError | None) -> None:
        """Nothing is sent after this. The first end counts."""
        self.outbox.end(error)
