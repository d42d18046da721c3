"""`kvrelay status`: a map of a running cluster, from what its router says at /ready. Rendering is pure.

kvrelay on http://127.0.0.1:8000 is ready
requests: 3 running, 0 waiting of at most 64; a request may have 8176 tokens
tokens/s: 41.5 generated, 310.0 prompt, over the last 10 s

worker     pid    health  running  waiting  blocks
prefill-0  60211  ready         1        0  [###.................]  held 150, free 874 of 1024
decode-0   60212  ready         2        0  [##=.................]  held 70, reserved 40, free 914 of 1024

KV from prefill-0 to decode-0: shm
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cluster.router_http import ask_router
from pd_core.errors import Unavailable

DEADLINE_S = 3.0
BAR_CELLS = 20
BAR_MARKS = {"held": "#", "cached": "+", "reserved": "=", "quarantined": "x", "free": "."}
"""How a pool's bar shows the states of its blocks."""


class Worker(msgspec.Struct, frozen=True):
    """One worker of the map. What the router has not heard yet is None.

    blocks: by state, and "total"
    kv_paths: how its KV goes to others, by their names
    """

    name: str
    role: str
    health: str
    silent_s: float
    pid: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    blocks: dict[str, int] | None = None
    kv_paths: dict[str, str] = {}


class Mismatch(msgspec.Struct, frozen=True):
    """Two workers between which no KV can go, and what differs."""

    prefill: str
    decode: str
    why: str


class Throughput(msgspec.Struct, frozen=True):
    """Tokens a second over the last `window_s`."""

    window_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float


class ClusterStatus(msgspec.Struct, frozen=True):
    """/ready as far as the map shows it; unknown fields are left out."""

    ready: bool
    reason: str | None
    running: int
    waiting: int
    workers: list[Worker]
    max_request_tokens: int | None = None
    max_queue: int | None = None
    throughput: Throughput | None = None
    kv_mismatches: list[Mismatch] = []


def read_status(url: str, deadline_s: float = DEADLINE_S) -> bytes:
    """The body of /ready of the router at `url`, ready or not.

    Raises ConfigError when `url` is none; Unavailable, naming it, when nobody answers in time or it is no kvrelay.
    """
    return ask_router(url, "/ready", deadline_s=deadline_s).body


def parse_status(url: str, body: bytes) -> ClusterStatus:
    """Raises Unavailable when the body is no /ready of ours."""
    try:
        return msgspec.json.decode(body, type=ClusterStatus)
    except msgspec.DecodeError as error:
        raise Unavailable(f"what answers on {url} is no kvrelay: {error}") from error


def render(url: str, status: ClusterStatus) -> str:
    """The map, as lines that end with a line feed."""
    state = "is ready" if status.ready else f"is not ready: {status.reason or 'it does not say why'}"
    lines = [f"kvrelay on {url} {state}", _requests(status)]
    rate = status.throughput
    if rate is not None:
        lines.append(
            f"tokens/s: {rate.generated_tokens_per_s:.1f} generated, {rate.prompt_tokens_per_s:.1f} prompt, "
            f"over the last {rate.window_s:g} s"
        )
    lines += ["", *_table(status.workers), *_kv_paths(status.workers)]
    lines += [f"no KV from {each.prefill} to {each.decode}: {each.why}" for each in status.kv_mismatches]
    return "\n".join(lines) + "\n"


def bar(blocks: dict[str, int], num_cells: int = BAR_CELLS) -> str:
    """A pool as a bar: every state that has blocks has a cell at least, so that one held block of thousands is seen."""
    counts = {mark: blocks.get(state, 0) for state, mark in BAR_MARKS.items() if blocks.get(state, 0)}
    cells = {mark: max(1, num * num_cells // sum(counts.values())) for mark, num in counts.items()}
    while cells and (over := sum(cells.values()) - num_cells):
        widest = max(cells, key=lambda mark: cells[mark] if over > 0 else counts[mark] / cells[mark])
        cells[widest] -= 1 if over > 0 else -1
    return f"[{''.join(mark * num for mark, num in cells.items()).ljust(num_cells, BAR_MARKS['free'])}]"


def _requests(status: ClusterStatus) -> str:
    queue = "" if status.max_queue is None else f" of at most {status.max_queue}"
    limit = "" if status.max_request_tokens is None else f"; a request may have {status.max_request_tokens} tokens"
    return f"requests: {status.running} running, {status.waiting} waiting{queue}{limit}"


def _table(workers: Sequence[Worker]) -> list[str]:
    if not workers:
        return ["no workers"]
    heads = ["worker", "pid", "health", "running", "waiting", "blocks"]
    rows = [heads, *(_row(worker) for worker in workers)]
    known = [column for column in range(len(heads)) if any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in known}
    return ["  ".join(_cell(row[c], widths[c], heads[c]) for c in known).rstrip() for row in rows]


def _kv_paths(workers: Sequence[Worker]) -> list[str]:
    paths = [
        f"KV from {one.name} to {other}: {path}" for one in workers for other, path in sorted(one.kv_paths.items())
    ]
    return ["", *paths] if paths else []


def _cell(text: str, width: int, head: str) -> str:
    return text.rjust(width) if head in ("running", "waiting") else text.ljust(width)


def _row(worker: Worker) -> list[str]:
    health = worker.health if worker.health == "ready" else f"{worker.health}, silent {worker.silent_s:.1f} s"
    return [
        worker.name,
        _or_nothing(worker.pid),
        health,
        _or_nothing(worker.num_running),
        _or_nothing(worker.num_waiting),
        "" if worker.blocks is None else f"{bar(worker.blocks)}  {_counts(worker.blocks)}",
    ]


def _counts(blocks: dict[str, int]) -> str:
    used = [f"{state} {num}" for state, num in blocks.items() if num and state not in ("total", "free")]
    return ", ".join([*used, f"free {blocks.get('free', 0)} of {blocks.get('total', 0)}"])


def _or_nothing(number: int | None) -> str:
    return "" if number is None else str(number)


def as_json(url: str, body: bytes) -> str:
    """All that /ready says, in one line, with the url."""
    known: dict[str, Any] = msgspec.json.decode(body)
    return msgspec.json.encode({"url": url} | known).decode() + "\n"
