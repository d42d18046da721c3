"""Probing the paths of every pair of workers, one pair after the other: POST /debug/paths.

The answer comes in lines of JSON, so that whoever waits sees how far it is: first one about the whole, then one for
each pair as it is done.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from pd_core.errors import InvalidRequest, KvrelayError, Overloaded
from pd_core.layout import BLOCK_TOKENS
from pd_core.messages import PathsProbed, ProbePaths
from router.policy import mismatches
from router.serving import Serving
from router.timeline import Timeline
from router.view import Health, WorkerView

PAIR_S = 60.0
"""One pair, with every path of it failing at its deadline."""
RETRY_AFTER_S = 5.0
Line = dict[str, Any]


class ProbeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of the POST. num_blocks: of one push; num_rounds: pushes over each path that count"""

    num_blocks: int = 16
    num_rounds: int = 5


def parse_order(body: bytes) -> ProbeOrder:
    """Raises InvalidRequest naming the field. An empty body is all defaults."""
    try:
        order = msgspec.json.decode(body or b"{}", type=ProbeOrder)
    except msgspec.DecodeError as error:
        sentence, _, path = str(error).partition(" - at `$")
        raise InvalidRequest(f"the body is not what it must be: {sentence}", param=path.strip("`.") or None) from error
    for field in ProbeOrder.__struct_fields__:
        if getattr(order, field) < 1:
            raise InvalidRequest(f"{field} is {getattr(order, field)}; at least 1", param=field)
    return order


class PathProbes:
    """transfer_path: what the config asks for; clock: of the serving"""

    def __init__(self, serving: Serving, model: str, transfer_path: str, clock: Callable[[], float]) -> None:
        self._serving = serving
        self._model = model
        self._transfer_path = transfer_path
        self._clock = clock
        self._is_running = False

    def begin(self, order: ProbeOrder) -> AsyncIterator[Line]:
        """JSON-ready lines. Raises Overloaded while another run of probes is under way."""
        if self._is_running:
            raise Overloaded("the paths are being probed already", retry_after_s=RETRY_AFTER_S)
        self._is_running = True
        return self._run(order)

    def end(self) -> None:
        """Whoever has begun says that its lines are over, or that it wants no more of them."""
        self._is_running = False

    async def _run(self, order: ProbeOrder) -> AsyncIterator[Line]:
        view, now_s = self._serving.fleet.view, self._clock()
        prefills, decodes = (view.of_role(role, (Health.READY,), now_s) for role in ("prefill", "decode"))
        yield {
            "object": "paths",
            "model": self._model,
            "transfer_path": self._transfer_path,
            "chunk_tokens": view.rules.chunk_tokens,
            "block_tokens": BLOCK_TOKENS,
            "max_request_tokens": None if view.limits is None else view.limits.num_tokens,
            "has_prefill_workers": "prefill" in view.rules.roles,
            "num_blocks": order.num_blocks,
            "num_rounds": order.num_rounds,
            "num_pairs": len(prefills) * len(decodes),
            "workers": [
                {"name": name, "role": worker.endpoint.role, "health": worker.health(now_s, view.rules).value}
                for name, worker in sorted(view.workers.items())
            ],
        }
        differences = mismatches(view)
        for prefill in prefills:
            for decode in decodes:
                why = differences.get((prefill.endpoint.name, decode.endpoint.name))
                yield await self._pair(prefill, decode, order, why)

    async def _pair(self, prefill: WorkerView, decode: WorkerView, order: ProbeOrder, mismatch: str | None) -> Line:
        name = prefill.endpoint.name
        line: Line = {
            "object": "pair",
            "prefill": name,
            "decode": decode.endpoint.name,
            "hosts": [prefill.endpoint.host, decode.endpoint.host],
            "prefill_tokens_per_s": self._tokens_per_s(name),
        }
        if mismatch is not None:
            return line | {"error": {"code": "layout_mismatch", "message": mismatch}}
        body = ProbePaths(decode.endpoint, order.num_blocks, order.num_rounds)
        try:
            found: PathsProbed = await self._serving.fleet.probe_paths(prefill.ref, body, PAIR_S)
        except KvrelayError as error:
            return line | {"error": {"code": error.code, "message": error.message}}
        return (
            line
            | {field: getattr(found, field) for field in ("in_use", "how", "control_s", "block_bytes")}
            | {"paths": [msgspec.to_builtins(path) for path in found.paths]}
        )

    def _tokens_per_s(self, prefill: str) -> float | None:
        return prompt_rate(self._serving.recent, prefill, self._serving.fleet.view.rules.chunk_tokens)


def prompt_rate(timelines: Iterable[Timeline], worker: str, chunk_tokens: int) -> float | None:
    """Prompt tokens a second of this worker, the median of its whole chunks: those had their step to themselves.

    None when none of the requests that are remembered had one.
    """
    rates = [
        chunk.num_tokens / chunk.took_s
        for timeline in timelines
        if timeline.prefill == worker
        for chunk in timeline.chunks
        if chunk.num_tokens == chunk_tokens and chunk.took_s > 0
    ]
    return statistics.median(rates) if rates else None
