"""Whose turn it is among those that wait. Pure.

The line is looked at from its front, and the first one for whom there is a place has its turn. So one that cannot be
placed is passed, which a later equal never can do: whatever it could take, the earlier one would have taken.

    waits for prompts that come first    may be passed: a shorter prompt is computed between the chunks of longer ones.
                                         Waiting makes it shorter in this order, until nothing new comes first
    waits for room in a pool             may be passed for PATIENCE_S. Then one worker is kept for it, whose pool can
                                         hold it: nobody else is placed there, so what runs there ends, and it has room

One at a time has workers kept for it, the oldest; so however many pass elsewhere, each has its turn in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

from router.policy import NOBODY, Demand, Obstacle, Placement, place, room_to_keep
from router.view import ClusterView, Health, Role

PATIENCE_S = 1.0
MAX_PASSED = 64
"""Beyond so many that wait nobody is looked at."""


class Waiter(msgspec.Struct, frozen=True):
    """number: its place: the lower, the earlier it came."""

    number: int
    demand: Demand


class Kept(msgspec.Struct, frozen=True):
    """Workers that take nobody but the waiter of this number."""

    number: int
    prefill: str | None = None
    decode: str | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name in (self.prefill, self.decode) if name is not None)


class Turn(msgspec.Struct, frozen=True):
    """Who is placed and where; None when all have to wait. kept: what is to be handed to the next call."""

    number: int | None
    placement: Placement | None
    kept: Kept | None


def next_turn(waiters: Iterable[Waiter], view: ClusterView, now_s: float, kept: Kept | None) -> Turn:
    """The next to be placed; `waiters` are in order of their numbers, `kept` is what the last call returned."""
    looked_at = list(islice(waiters, MAX_PASSED))
    if kept is not None and all(waiter.number != kept.number for waiter in looked_at):
        kept = None
    hindered: list[tuple[float, ...]] = []
    for waiter in looked_at:
        is_keeper = kept is not None and kept.number == waiter.number
        size = _size(waiter.demand, view, now_s)
        if not is_keeper and any(_is_no_smaller(size, other) for other in hindered):
            continue
        verdict = place(waiter.demand, view, now_s, NOBODY if kept is None or is_keeper else kept.names)
        if isinstance(verdict, Placement):
            return Turn(waiter.number, verdict, None if is_keeper else kept)
        if verdict is Obstacle.NOBODY_READY:
            return Turn(None, None, kept)
        role = _ROOM.get(verdict)
        is_first = kept is None or waiter.number <= kept.number
        if role is not None and is_first and now_s - waiter.demand.since_s >= PATIENCE_S:
            mine = kept if kept is not None and is_keeper else Kept(waiter.number)
            kept = _keep(mine, role, waiter.demand, view, now_s)
        hindered.append(size)
    return Turn(None, None, kept)


_ROOM: dict[Obstacle, Role] = {Obstacle.PREFILL_FULL: "prefill", Obstacle.DECODE_FULL: "decode"}


def _keep(kept: Kept, role: Role, demand: Demand, view: ClusterView, now_s: float) -> Kept:
    """With a worker of this role kept; the same one as long as it is ready."""
    name = kept.prefill if role == "prefill" else kept.decode
    if name is not None and any(w.endpoint.name == name for w in view.of_role(role, (Health.READY,), now_s)):
        return kept
    name = room_to_keep(role, demand, view, now_s)
    return Kept(kept.number, name, kept.decode) if role == "prefill" else Kept(kept.number, kept.prefill, name)


def _size(demand: Demand, view: ClusterView, now_s: float) -> tuple[float, ...]:
    """All that `place` looks at: what is no smaller in any of it cannot be placed where this one cannot."""
    return (
        demand.rank(now_s, view.rules.ageing_tokens_per_s),
        demand.num_prompt_blocks,
        demand.num_prompt_blocks + demand.num_growth_blocks,
        demand.num_final_blocks(view.usual_answer_tokens),
    )


def _is_no_smaller(size: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(ours >= theirs for ours, theirs in zip(size, other, strict=True))
