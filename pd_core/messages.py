"""What router, workers and supervisor say to each other over pd_rpc. The class's tag picks the handler.

    router  -> decode    StartDecode   : TicketGranted, HandoffCommitted, TokenMade, Preempted ...
                         StartBoth     : PromptAdmitted, TokenMade, PromptComputed, Preempted ...
    router  -> prefill   StartPrefill  : TokenMade, PrefillDone
    prefill -> decode    RenewLease    : LeaseHeld
                         FinishPrefill : HandoffVerdict
                         AllSent       : LeaseHeld
                         AbandonPrefill: LeaseHeld
                         OpenProbe     : TicketGranted
    router  -> prefill   ProbePaths    : PathsProbed
    anyone  -> worker    WatchStatus   : WorkerStatus ...
                         ReadLedger    : LedgerSnapshot
                         Drain         : Drained

Left of the colon the call, right of it what comes back; `...` is a stream. A call that fails comes back as an
ErrorInfo and is raised as its own class again.
"""

from __future__ import annotations

import enum

import msgspec

from pd_core.ledger import LedgerCounts, LedgerReport
from pd_core.request import FinishReason, GenerateRequest
from pd_core.ticket import FirstToken, Ticket, TicketRef
from pd_core.transfer import PathTotals, PathTransfer, ProbedPath


class StartDecode(msgspec.Struct, frozen=True, tag="start_decode"):
    """Reserve room for the request, take its KV when it comes, then decode it.

    Raises Overloaded when there is no room now, ContextLengthExceeded when there never is.
    """

    request: GenerateRequest
    attempt: int


class StartBoth(msgspec.Struct, frozen=True, tag="start_both"):
    """Compute the request's KV here, draw its first token, and decode it: no ticket, no transfer.

    Raises Overloaded when there is no room now, ContextLengthExceeded when there never is.
    """

    request: GenerateRequest
    attempt: int


class StartPrefill(msgspec.Struct, frozen=True, tag="start_prefill"):
    """Compute the request's KV, draw its first token, and hand both to the ticket's issuer."""

    request: GenerateRequest
    ticket: Ticket


class RenewLease(msgspec.Struct, frozen=True, tag="renew_lease"):
    """The writer is alive. Raises StaleTicket when nobody waits for it any more."""

    ref: TicketRef


class FinishPrefill(msgspec.Struct, frozen=True, tag="finish_prefill"):
    """The prompt is computed; its last blocks are on their way.

    Answered when the handoff is committed or, once AllSent has come too, with what is missing.
    """

    ref: TicketRef
    first_token: FirstToken


class AllSent(msgspec.Struct, frozen=True, tag="all_sent"):
    """Nothing of the ticket is on its way any more, so what has not arrived soon may be called missing.

    Raises StaleTicket as RenewLease does; also when all was there, and the request is over already.
    """

    ref: TicketRef


class AbandonPrefill(msgspec.Struct, frozen=True, tag="abandon_prefill"):
    """The writer gives up and has stopped writing."""

    ref: TicketRef
    reason: str


class OpenProbe(msgspec.Struct, frozen=True, tag="open_probe"):
    """Set blocks aside for a push that only measures. Its ticket is as any other; at its commit the blocks are free.

    Raises Overloaded when there is no room for it now, InvalidRequest for more blocks than a probe may have.
    """

    num_blocks: int


class ProbePaths(msgspec.Struct, frozen=True, tag="probe_paths"):
    """Push blocks that nobody needs to `peer` over each of its paths, one after the other, and say how fast each is.

    num_blocks: of one push; num_rounds: pushes over each path that count
    Raises Overloaded when a pool has no room for it now or a probe is under way, InvalidRequest for too much of it,
    LayoutMismatch, and what keeps the two from speaking at all.
    """

    peer: WorkerEndpoint
    num_blocks: int
    num_rounds: int


class WatchStatus(msgspec.Struct, frozen=True, tag="watch_status"):
    """Send a WorkerStatus now and every `interval_s`."""

    interval_s: float


class ReadLedger(msgspec.Struct, frozen=True, tag="read_ledger"):
    """Who holds which blocks right now."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new work, let what runs end within `grace_s`."""

    grace_s: float


class TicketGranted(msgspec.Struct, frozen=True, tag="ticket_granted"):
    ticket: Ticket


class PromptAdmitted(msgspec.Struct, frozen=True, tag="prompt_admitted"):
    """The prompt has its blocks, and its chunks are computed in turn."""


class ChunkDone(msgspec.Struct, frozen=True):
    """One prompt's share of one engine step: `num_tokens` from position `start` on.

    began_s: when the step began, in seconds after the worker admitted the prompt; took_s: how long it was
    """

    start: int
    num_tokens: int
    began_s: float
    took_s: float


class PromptComputed(msgspec.Struct, frozen=True, tag="prompt_computed"):
    """How the worker that decodes has computed the prompt itself. compute_s: time in the engine"""

    chunks: list[ChunkDone]
    compute_s: float


class HandoffCommitted(msgspec.Struct, frozen=True, tag="handoff_committed"):
    """All blocks are there and verified; the request is in the decode batch.

    path: the transport that carried them; num_bytes: KV bytes received; wait_s: from ticket to commit
    """

    path: str
    num_blocks: int
    num_bytes: int
    wait_s: float


class TokenMade(msgspec.Struct, frozen=True, tag="token_made"):
    """Token `index` of the client's stream. `finish` is set on the last."""

    index: int
    token: int
    finish: FinishReason | None = None


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """The sequence gave its blocks to older ones. Nothing is lost: it is computed again and goes on by itself.

    num_made: tokens of this attempt so far
    """

    num_made: int


class PrefillDone(msgspec.Struct, frozen=True, tag="prefill_done"):
    """The prefill worker holds nothing of the request any more.

    chunks: how the prompt was computed; compute_s: time in the engine
    push_s: time from the first token to the receiver's word that it has all; 0 when nothing was handed on
    transfers: what was sent, by path, in the order in which they were first used
    how: see BlockSender.path_to, at the end of the handoff; empty when nothing was handed on
    """

    chunks: list[ChunkDone]
    compute_s: float
    push_s: float
    transfers: list[PathTransfer] = []
    how: str = ""

    @property
    def num_bytes(self) -> int:
        """KV bytes sent."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    @property
    def transfer_s(self) -> float:
        """How long they were on their paths, without waiting for a turn."""
        return sum(transfer.seconds for transfer in self.transfers)


class PathsProbed(msgspec.Struct, frozen=True, tag="paths_probed"):
    """What a probe found out about the paths from one worker to another.

    paths:     those that the receiver offers, best first
    in_use:    the one that a push took which had the choice, as a handoff has; None when none works
    how:       see BlockSender.path_to, right after that push: what was known of the others too
    control_s: of a bare call over the control connection
    num_blocks, num_rounds: as they were asked for; block_bytes: of one block
    """

    paths: list[ProbedPath]
    in_use: str | None
    how: str
    control_s: float
    num_blocks: int
    num_rounds: int
    block_bytes: int


class LeaseHeld(msgspec.Struct, frozen=True, tag="lease_held"):
    """Understood. num_arrived: to a RenewLease, blocks of the ticket that are there and right"""

    num_arrived: int = 0


class HandoffVerdict(msgspec.Struct, frozen=True, tag="handoff_verdict"):
    """What became of a FinishPrefill: committed when `missing` is empty, else send these blocks again."""

    missing: list[int]


class WorkerState(enum.Enum):
    READY = "ready"
    DRAINING = "draining"


class WorkerStatus(msgspec.Struct, frozen=True, tag="worker_status"):
    """A worker's heartbeat. `number` counts up by one within one incarnation.

    counters: totals since boot, by metric name (tokens, handoffs, transfer bytes, ...)
    detail:   what the engine says of itself, for /ready
    kv_paths: how KV goes from here to other workers, by their names, and why not in a better way; for people
    transfers: what was pushed over each path, by its name
    """

    name: str
    role: str
    incarnation: str
    number: int
    state: WorkerState
    num_running: int
    num_waiting: int
    blocks: LedgerCounts
    context_tokens: int
    pool_tokens: int
    counters: dict[str, float]
    detail: dict[str, str]
    kv_paths: dict[str, str] = {}
    transfers: dict[str, PathTotals] = {}


class LedgerSnapshot(msgspec.Struct, frozen=True, tag="ledger_snapshot"):
    report: LedgerReport


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """How many requests were still running when the grace time was over."""

    num_cut: int


WORKER_REPLIES = (
    TicketGranted
    | PromptAdmitted
    | PromptComputed
    | HandoffCommitted
    | TokenMade
    | Preempted
    | PrefillDone
    | PathsProbed
    | LeaseHeld
    | HandoffVerdict
    | WorkerStatus
    | LedgerSnapshot
    | Drained
)
"""Everything that may come back from a worker; what an RpcClient to a worker is told to decode."""


class WorkerEndpoint(msgspec.Struct, frozen=True):
    """Where one boot of a worker can be reached; what the supervisor tells the router.

    role: "prefill" or "decode"; host, port: its control connections; pid: its process on that host
    """

    name: str
    role: str
    host: str
    port: int
    incarnation: str
    pid: int
