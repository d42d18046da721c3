"""When what happened to a request: for the log, the metrics and whoever asks why it was slow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from pd_core.messages import ChunkDone, HandoffCommitted, PrefillDone, PromptComputed
from pd_core.transfer import PathTransfer

MAX_CHUNKS = 256
MAX_PLACEMENTS = 16
"""Of each only so many are kept, so that what is remembered of a request is bounded."""


class PlacementNote(msgspec.Struct, frozen=True):
    """One choice of workers, and why. num_ahead, expected_s: what the policy predicted; see router.policy.Placement."""

    at_s: float
    prefill: str | None
    decode: str
    reason: str
    num_ahead: int
    expected_s: float | None


class Timeline(msgspec.Struct):
    """Moments are seconds of the router's clock; None is "not yet" or "never".

    arrived_s:   the client's request began to arrive; queued_s: it was understood and asked for a turn
    placed_s:    the policy chose workers (the last time, if one had refused before; None while it waits again)
    reserved_s:  the decode worker's ticket came, or it has taken the prompt; committed_s: decode had all KV
    placements:  the first ones and the last
    num_tokens, last_token_s: of the answer as far as its reader has come, and when the last of them was there
    num_refusals: placements that a worker refused for want of room; the request waited again then
    num_preemptions, preempted_s: how often decode took its blocks for older ones, and when last
    path, num_kv_blocks, num_kv_bytes, handoff_s: how the KV went over, how much, and from ticket to commit
    chunks, compute_s: as the worker that computed the prompt measured them; of the chunks the first ones
    push_s, transfers, how: what the prefill worker says of the handoff; see PrefillDone
    outcome:     "finished", "failed" or "cancelled"; error: the error's code
    """

    request_id: str
    num_prompt: int
    arrived_s: float
    queued_s: float
    placed_s: float | None = None
    reserved_s: float | None = None
    first_token_s: float | None = None
    committed_s: float | None = None
    preempted_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_attempts: int = 0
    prefill: str | None = None
    decode: str | None = None
    placements: list[PlacementNote] = []
    num_tokens: int = 0
    num_refusals: int = 0
    num_preemptions: int = 0
    path: str | None = None
    num_kv_blocks: int | None = None
    num_kv_bytes: int | None = None
    handoff_s: float | None = None
    chunks: list[ChunkDone] = []
    num_chunks: int | None = None
    compute_s: float | None = None
    push_s: float | None = None
    transfers: list[PathTransfer] = []
    how: str | None = None
    outcome: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def queue_s(self) -> float | None:
        return None if self.placed_s is None else self.placed_s - self.queued_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.arrived_s

    @property
    def exposed_s(self) -> float | None:
        """From the first token to decode's having all KV: what the handoff adds to the wait for the second token."""
        if self.first_token_s is None or self.committed_s is None:
            return None
        return max(0.0, self.committed_s - self.first_token_s)

    @property
    def transfer_s(self) -> float | None:
        """How long KV was on its way, over all paths; None when none was, or that is not known yet."""
        return sum(transfer.seconds for transfer in self.transfers) if self.transfers else None

    @property
    def bytes_per_s(self) -> float | None:
        """How fast the paths were while something was on them."""
        seconds = self.transfer_s
        return sum(transfer.num_bytes for transfer in self.transfers) / seconds if seconds else None

    def placed(self, note: PlacementNote, attempt: int) -> None:
        self.placed_s, self.num_attempts = note.at_s, attempt
        self.prefill, self.decode = note.prefill, note.decode
        if len(self.placements) == MAX_PLACEMENTS:
            self.placements.pop()
        self.placements.append(note)

    def turn_given_back(self) -> None:
        """A worker has refused: it is placed nowhere, and waits as it did before."""
        self.num_refusals += 1
        self.placed_s = self.reserved_s = self.prefill = self.decode = None

    def handed_over(self, message: HandoffCommitted) -> None:
        self.path, self.handoff_s = message.path, message.wait_s
        self.num_kv_blocks, self.num_kv_bytes = message.num_blocks, message.num_bytes

    def prefilled(self, message: PrefillDone) -> None:
        self._computed(message.chunks, message.compute_s)
        self.push_s, self.transfers, self.how = message.push_s, message.transfers, message.how

    def prompt_computed(self, message: PromptComputed) -> None:
        self._computed(message.chunks, message.compute_s)

    def _computed(self, chunks: list[ChunkDone], compute_s: float) -> None:
        self.chunks, self.num_chunks, self.compute_s = chunks[:MAX_CHUNKS], len(chunks), compute_s

    def for_log(self) -> dict[str, object]:
        """Only what is known; moments as milliseconds after arrival."""
        line: dict[str, object] = {}
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is None or field in ("arrived_s", "placements", "chunks", "transfers"):
                continue
            if field in _MOMENTS:
                line[field.removesuffix("_s") + "_ms"] = self.ms(value)
            elif field.endswith("_s"):
                line[field.removesuffix("_s") + "_ms"] = round(value * 1e3, 2)
            else:
                line[field] = value
        if self.transfers:
            line["kv_sent"] = [msgspec.to_builtins(transfer) for transfer in self.transfers]
        if self.placements:
            line["reason"] = self.placements[-1].reason
        return line

    def moments_ms(self) -> dict[str, float | None]:
        """All moments in milliseconds after arrival."""
        values = {field: getattr(self, field) for field in _MOMENTS}
        return {field.removesuffix("_s"): None if at_s is None else self.ms(at_s) for field, at_s in values.items()}

    def ms(self, at_s: float) -> float:
        return round((at_s - self.arrived_s) * 1e3, 2)


_MOMENTS = (
    "queued_s",
    "placed_s",
    "reserved_s",
    "first_token_s",
    "committed_s",
    "preempted_s",
    "last_token_s",
    "ended_s",
)


class RecentTimelines:
    """The last `max_kept` requests that ended, by their ids."""

    def __init__(self, max_kept: int = 1024) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[str, Timeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Timeline]:
        """In the order in which they ended."""
        return iter(list(self._kept.values()))

    def find(self, request_id: str) -> Timeline | None:
        return self._kept.get(request_id)

    def add(self, timeline: Timeline) -> None:
        self._kept[timeline.request_id] = timeline
        self._kept.move_to_end(timeline.request_id)
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
