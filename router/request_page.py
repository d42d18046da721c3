"""GET /v1/requests/{id}: what happened to a request that runs or ended lately, and why.

The id is the one that we made: `id` of the reply, and the header x-request-id where the client chose none. Times are
milliseconds after the request's arrival unless they are said to be durations; null is "not yet" or "never".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.timeline import PlacementNote, Timeline


def request_page(request_id: str, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """JSON-ready; it says nothing of what was asked or answered but how long both are. One with several choices has a
    page for each in `choices`."""
    if [timeline.request_id for timeline in timelines] == [request_id]:
        return _page(timelines[0])
    return {"id": request_id, "object": "request", "choices": [_page(timeline) for timeline in timelines]}


def _page(timeline: Timeline) -> dict[str, Any]:
    return {
        "id": timeline.request_id,
        "object": "request",
        "state": timeline.outcome or _state(timeline),
        "error": timeline.error,
        "num_prompt_tokens": timeline.num_prompt,
        "num_generated_tokens": timeline.num_tokens,
        "moments_ms": timeline.moments_ms(),
        "durations_ms": {
            "queue": _ms(timeline.queue_s),
            "ttft": _ms(timeline.ttft_s),
            "mean_itl": _ms(_mean_itl_s(timeline)),
            "total": _ms(timeline.e2e_s),
        },
        "num_attempts": timeline.num_attempts,
        "placements": [_placement(timeline, note) for note in timeline.placements],
        "prefill": _prefill(timeline),
        "transfer": _transfer(timeline),
        "num_preemptions": timeline.num_preemptions,
    }


def _state(timeline: Timeline) -> str:
    """Of one that has not ended."""
    if timeline.first_token_s is not None:
        return "decoding"
    if timeline.placed_s is None:
        return "queued"
    return "reserving" if timeline.reserved_s is None else "prefilling"


def _placement(timeline: Timeline, note: PlacementNote) -> dict[str, Any]:
    """With what was predicted, and for the one that led to a first token what came of it."""
    is_last = note is timeline.placements[-1]
    actual_s = None
    if is_last and timeline.first_token_s is not None:
        actual_s = timeline.first_token_s - note.at_s
    return {
        "at_ms": timeline.ms(note.at_s),
        "prefill": note.prefill,
        "decode": note.decode,
        "reason": note.reason,
        "prompt_tokens_ahead": note.num_ahead,
        "expected_first_token_ms": _ms(note.expected_s),
        "actual_first_token_ms": _ms(actual_s),
    }


def _prefill(timeline: Timeline) -> dict[str, Any] | None:
    """As the worker that computed the prompt measured it; None before it has said so."""
    if timeline.num_chunks is None:
        return None
    return {
        "compute_ms": _ms(timeline.compute_s),
        "num_chunks": timeline.num_chunks,
        "chunks": [
            {
                "start": chunk.start,
                "num_tokens": chunk.num_tokens,
                "began_ms_after_admission": _ms(chunk.began_s),
                "took_ms": _ms(chunk.took_s),
            }
            for chunk in timeline.chunks
        ],
    }


def _transfer(timeline: Timeline) -> dict[str, Any] | None:
    """How the KV went over; None where it did not, or not yet.

    From ticket to commit it overlaps with computing. What it adds to that: exposed_ms, from the first token to the
    moment at which decode had all, by the router's clock, and push_ms, the same as the prefill worker saw it.
    path_ms is how long KV was on its way, all pushes together, and gb_per_s how fast it was then; by_path the same of
    each path alone, as its sender counts. how: the path as the prefill worker has it, and why not a better one.
    """
    if timeline.path is None or timeline.num_kv_bytes is None:
        return None
    return {
        "path": timeline.path,
        "num_blocks": timeline.num_kv_blocks,
        "num_bytes": timeline.num_kv_bytes,
        "ticket_to_commit_ms": _ms(timeline.handoff_s),
        "exposed_ms": _ms(timeline.exposed_s),
        "push_ms": _ms(timeline.push_s),
        "path_ms": _ms(timeline.transfer_s),
        "gb_per_s": _gb(timeline.bytes_per_s),
        "by_path": [
            {
                "path": transfer.path,
                "num_bytes": transfer.num_bytes,
                "path_ms": _ms(transfer.seconds),
                "gb_per_s": _gb(transfer.num_bytes / transfer.seconds if transfer.seconds else None),
            }
            for transfer in timeline.transfers
        ],
        "how": timeline.how,
    }


def _gb(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else round(bytes_per_s / 1e9, 4)


def _mean_itl_s(timeline: Timeline) -> float | None:
    if timeline.first_token_s is None or timeline.last_token_s is None or timeline.num_tokens < 2:
        return None
    return (timeline.last_token_s - timeline.first_token_s) / (timeline.num_tokens - 1)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
