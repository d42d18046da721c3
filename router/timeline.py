"""When what happened to a request: for the log, the metrics and whoever asks why it was slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec


class Timeline(msgspec.Struct):
    """Moments are seconds of the router's clock; None is "not yet" or "never".

    arrived_s:   the client's request began to arrive; queued_s: it was understood and asked for a turn
    placed_s:    the policy chose workers (the last time, if decode had refused before)
    reserved_s:  the decode worker's ticket came; committed_s: decode had all KV
    path, num_kv_bytes: how the KV went over, and how much
    compute_s, push_s: as the prefill worker measured them
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
    last_token_s: float | None = None
    ended_s: float | None = None
    num_attempts: int = 0
    prefill: str | None = None
    decode: str | None = None
    reason: str | None = None
    num_tokens: int = 0
    path: str | None = None
    num_kv_bytes: int | None = None
    compute_s: float | None = None
    push_s: float | None = None
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

    def for_log(self) -> dict[str, object]:
        """Only what is known; moments as milliseconds after arrival."""
        line: dict[str, object] = {}
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is None or field == "arrived_s":
                continue
            if field in _MOMENTS:
                line[field.removesuffix("_s") + "_ms"] = round((value - self.arrived_s) * 1e3, 2)
            elif field.endswith("_s"):
                line[field.removesuffix("_s") + "_ms"] = round(value * 1e3, 2)
            else:
                line[field] = value
        return line


_MOMENTS = frozenset(
    ("queued_s", "placed_s", "reserved_s", "first_token_s", "committed_s", "last_token_s", "ended_s"),
)


class RecentTimelines:
    """The last `max_kept` requests that ended."""

    def __init__(self, max_kept: int = 1024) -> None:
        self._kept: deque[Timeline] = deque(maxlen=max_kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self._kept)

    def add(self, timeline: Timeline) -> None:
        self._kept.append(timeline)
