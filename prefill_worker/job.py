"""One prompt on a prefill worker, and how far it is."""

from __future__ import annotations

import threading

from pd_core.engine import SequenceStep
from pd_core.errors import KvrelayError
from pd_core.messages import ChunkDone, PrefillDone, StartPrefill
from pd_core.request import GenerateRequest
from pd_core.ticket import Ticket
from pd_worker.outbox import Outbox
from pd_worker.outgoing import OutgoingHandoff
from prefill_worker.policy import chunk_end


class PrefillJob:
    """A prompt from its admission until its blocks are released.

    holder:      its name in the ledger
    block_ids:   blocks of the whole prompt, whatever part of them the ticket ships
    handoff:     set right after the admission
    is_unwanted: set when the engine may leave the job's step; read by the engine's thread
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
        self.is_unwanted = threading.Event()
        self.is_finished = False
        self.is_released = False
        self.num_computed = 0
        self.admitted_s = now_s
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

    def next_step(self, chunk_tokens: int) -> SequenceStep:
        """The next chunk; the last one draws the first token."""
        end = chunk_end(self.num_computed, self.num_prompt, chunk_tokens)
        return SequenceStep(
            tokens=self.request.tokens[self.num_computed : end],
            start=self.num_computed,
            block_ids=self.block_ids,
            sample=self.request.sampling if end == self.num_prompt else None,
        )

    def take(self, step: SequenceStep, began_s: float, now_s: float) -> None:
        """The step's KV is in our blocks."""
        self.num_computed = step.end
        self.chunks.append(ChunkDone(step.start, len(step.tokens), began_s - self.admitted_s, now_s - began_s))

    def end(self, error: KvrelayError | None) -> None:
        """Nothing is sent to the router after this, and the engine may leave. The first end counts."""
        self.outbox.end(error)
        self.is_unwanted.set()

    def report(self, now_s: float) -> PrefillDone:
        """What the handoff was, for the router."""
        num_bytes = 0 if self.handoff is None else self.handoff.num_bytes
        push_s = now_s - self.first_token_s if self.first_token_s else 0.0
        return PrefillDone(self.chunks, sum(chunk.took_s for chunk in self.chunks), push_s, num_bytes)
