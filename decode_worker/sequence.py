"""One request on a decode worker: its tokens, and what its router is told."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.roster import PlannedPart
from pd_core.engine import SequenceStep
from pd_core.errors import KvrelayError
from pd_core.messages import ChunkDone, Preempted, PromptComputed, TokenMade
from pd_core.request import GenerateRequest, continue_request, finish_after
from pd_worker.incoming import IncomingHandoff
from pd_worker.outbox import Outbox
from pd_worker.step_run import PartDone


def holder_name(request_id: str, attempt: int) -> str:
    """What a placement of a request is called in ledger and roster."""
    return f"{request_id}/{attempt}"


class DecodeSequence:
    """A request from its admission to its last token.

    request: what is still to be made; after a preemption the continuation of what was asked for
    holder:  its name in ledger and roster
    handoff: how its KV comes in; set right after the reservation, None when its prompt is computed here
    num_made: tokens made so far, the prefill's one among them
    """

    def __init__(self, request: GenerateRequest, attempt: int, outbox: Outbox, now_s: float) -> None:
        self.request = request
        self.attempt = attempt
        self.outbox = outbox
        self.holder = holder_name(request.request_id, attempt)
        self.handoff: IncomingHandoff | None = None
        self.num_made = 0
        self._made: list[int] = []  # since the last preemption
        self._admitted_s = now_s
        self._chunks: list[ChunkDone] = []  # of a prompt that is computed here, until its first token

    @property
    def is_over(self) -> bool:
        return self.outbox.is_over

    def step_for(self, part: PlannedPart, table: Sequence[int]) -> SequenceStep:
        """Its share of an engine step: a chunk of the prompt, or the last token, whose KV is missing."""
        num_prompt = len(self.request.tokens)
        tokens = self.request.tokens[part.start : part.end]
        if part.start >= num_prompt:
            tokens = self._made[part.start - num_prompt : part.end - num_prompt]
        return SequenceStep(tokens, part.start, table, self.request.sampling if part.draws else None)

    def chunk_done(self, part: PlannedPart, done: PartDone) -> None:
        """Notes how the prompt was computed, until that is reported with the first token."""
        if self.handoff is None and self.num_made == 0:
            took_s = done.ended_s - done.began_s
            chunk = ChunkDone(part.start, part.end - part.start, done.began_s - self._admitted_s, took_s)
            self._chunks.append(chunk)

    def take(self, token: int) -> None:
        """Sends the token on. The sequence is over after its last one, or when the router reads too slowly."""
        index = self.request.first_index + len(self._made)
        self._made.append(token)
        self.num_made += 1
        finish = finish_after(self.request, token, len(self._made))
        error = self.outbox.try_put(TokenMade(index, token, finish))
        if self._chunks and error is None:
            chunks, self._chunks = self._chunks, []
            error = self.outbox.try_put(PromptComputed(chunks, sum(chunk.took_s for chunk in chunks)))
        if error is not None or finish is not None:
            self.end(error)

    def preempted(self) -> None:
        """Its blocks are gone; it goes on by computing all its tokens again."""
        self.request = continue_request(self.request, self._made)
        self._made = []
        error = self.outbox.try_put(Preempted(self.num_made))
        if error is not None:
            self.end(error)

    def end(self, error: KvrelayError | None) -> None:
        """Nothing is sent after this. The first end counts."""
        self.outbox.end(error)
