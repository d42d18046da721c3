"""One prompt on a prefill worker, and how far it is."""

from __future__ import annotations

from pd_core.engine import SequenceStep
from pd_core.errors import KvrelayError
from pd_core.messages import ChunkDone, PrefillDone, StartPrefill
from pd_core.request import GenerateRequest
from pd_core.ticket import Ticket
from pd_worker.outbox import Outbox
from pd_worker.outgoing import OutgoingHandoff
from pd_worker.policy import PromptWork, Share
from pd_worker.step_run import PartDone, StepPart
from prefill_worker.policy import indices_done


class PrefillJob:
    """A prompt from its admission until its blocks are released.

    holder:      its name in the ledger
    block_ids:   blocks of the whole prompt, whatever part of them the ticket ships
    handoff:     set right after the admission
    is_finished: the first token was the last: nobody needs the KV
    is_released: the handoff needs the blocks no more; they are free when the engine has left too
    """

    def __init__(self, body: StartPrefill, block_ids: list[int], outbox: Outbox, now_s: float) -> None:
        self.request: GenerateRequest = body.request
        self.ticket: Ticket = body.ticket
        self.holder = f"{body.request.request_id}/{body.ticket.ref.attempt}"
        self.block_ids = block_ids
        self.outbox = outbox
        self.handoff: OutgoingHandoff | None = None
        self.is_finished = False
        self.is_released = False
        self.num_computed = 0
        self.admitted_s = now_s
        self._waits_since_s = now_s
        self.chunks: list[ChunkDone] = []
        self.first_token_s = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def is_computed(self) -> bool:
        return self.num_computed == self.num_prompt

    @property
    def is_over(self) -> bool:
        return self.outbox.is_over

    def work(self, now_s: float) -> PromptWork:
        """What the choice of the next chunks looks at."""
        return PromptWork(self.num_computed, self.num_prompt, now_s - self._waits_since_s)

    def part(self, share: Share) -> StepPart:
        """Its share of the next step; the last one draws the first token."""
        step = SequenceStep(
            tokens=self.request.tokens[share.start : share.end],
            start=share.start,
            block_ids=self.block_ids,
            sample=self.request.sampling if share.end == self.num_prompt else None,
        )
        return StepPart(step, self._is_unwanted)

    def take(self, share: Share, done: PartDone) -> list[int]:
        """The share's KV is in our blocks; the blocks of the ticket's range that are final with it."""
        indices = self._indices_done(share.end)
        self.num_computed = share.end
        self._waits_since_s = done.ended_s
        took_s = done.ended_s - done.began_s
        self.chunks.append(ChunkDone(share.start, share.num_tokens, done.began_s - self.admitted_s, took_s))
        return indices

    def end(self, error: KvrelayError | None) -> None:
        """Nothing is sent to the router after this, and the engine may leave. The first end counts."""
        self.outbox.end(error)

    def _is_unwanted(self) -> bool:
        return self.is_over

    def _indices_done(self, end: int) -> list[int]:
        num_ready = 0 if self.handoff is None else self.handoff.num_ready
        return indices_done(self.ticket, num_ready, end, self.num_prompt)

    def report(self) -> PrefillDone:
        """What the handoff was, for the router."""
        handoff, push_s = self.handoff, 0.0
        if handoff is not None and handoff.committed_s is not None:
            push_s = handoff.committed_s - self.first_token_s
        return PrefillDone(
            self.chunks,
            compute_s=sum(chunk.took_s for chunk in self.chunks),
            push_s=push_s,
            transfers=[] if handoff is None else handoff.transfers,
            how="" if handoff is None else handoff.how,
        )
