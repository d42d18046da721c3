"""What bringing stored KV back costs, what computing it again costs, and which of the two is to be done. Pure.

    tokens:   0 .......... cached .......... front .......... stored .... num_prompt
              |- is here ----|--- restored ----|-------- computed ------------|

Both costs are fitted live (robust_fit) and travel as plain numbers (`TierRate`, `PrefillRate`) to whoever decides.
Restoring grows with the bytes; parts in different tiers come at the same time. Computing grows faster than the tokens,
because attention looks back: the front of a prefix is cheap to compute, its end is not. Computing starts when what it
looks back at is there, so the two times add up.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kv_store.robust_fit import RobustFit
from pd_core.layout import BLOCK_TOKENS

_FIRST_SIZES_BYTES = (0, 2**18, 2**24, 2**27, 2**30)
_FIRST_CHUNKS = (0, 3, 15, 63)
"""Where the first belief of a rate is believed, so that a few odd measurements do not overturn it."""


class TierRate(msgspec.Struct, frozen=True):
    """What reading from a tier takes: latency_s until the first byte, and byte_s for each."""

    latency_s: float
    byte_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.byte_s


class PrefillRate(msgspec.Struct, frozen=True):
    """What computing a prompt takes.

    step_s:       of each step, however many tokens
    token_s:      of each token, wherever it stands
    look_back_s:  of each token, for each position before it
    chunk_tokens: most tokens of a step
    """

    step_s: float
    token_s: float
    look_back_s: float
    chunk_tokens: int

    def seconds(self, start: int, end: int) -> float:
        """Positions start .. end - 1. They lie in one chunk more than would hold them, on the average."""
        if start >= end:
            return 0.0
        num_tokens = end - start
        return (
            self.step_s * (1.0 + num_tokens / self.chunk_tokens)
            + self.token_s * num_tokens
            + self.look_back_s * _look_backs(start, end)
        )


class TierCost:
    """A tier's rate, fitted to reads as they happen. `first` is believed before."""

    def __init__(self, first: TierRate) -> None:
        self._fit = RobustFit([((1.0, num_bytes), first.seconds(num_bytes)) for num_bytes in _FIRST_SIZES_BYTES])

    def measure(self, num_bytes: int, took_s: float, now_s: float) -> None:
        """A read of so many bytes took so long, waiting included."""
        self._fit.measure((1.0, num_bytes), took_s, now_s)

    def rate(self, now_s: float) -> TierRate:
        latency_s, byte_s = self._fit.terms(now_s)
        return TierRate(latency_s, byte_s)


class PrefillCost:
    """A worker's rate of prefill, fitted to steps as they happen. `first` is believed before."""

    def __init__(self, first: PrefillRate) -> None:
        self._chunk_tokens = first.chunk_tokens
        chunk = first.chunk_tokens
        steps = [(0, 1), *((number * chunk, (number + 1) * chunk) for number in _FIRST_CHUNKS)]
        believed = (first.step_s, first.token_s, first.look_back_s)
        features = [_step_features(start, end) for start, end in steps]
        self._fit = RobustFit([(row, sum(map(operator.mul, believed, row))) for row in features])

    def measure(self, start: int, end: int, took_s: float, now_s: float) -> None:
        """One step computed positions start .. end - 1 of a prompt, and nothing else that counts."""
        self._fit.measure(_step_features(start, end), took_s, now_s)

    def rate(self, now_s: float) -> PrefillRate:
        step_s, token_s, look_back_s = self._fit.terms(now_s)
        return PrefillRate(step_s, token_s, look_back_s, self._chunk_tokens)


class StoredPart(msgspec.Struct, frozen=True):
    """Blocks in a row that one tier has."""

    tier: str
    num_blocks: int


class RestoreChoice(enum.Enum):
    REUSE = "reuse"  # nothing is stored beyond what is here
    RESTORE = "restore"  # all that is stored
    RESTORE_FRONT = "restore_front"  # some of it; the rest is computed
    RECOMPUTE = "recompute"  # nothing is brought back


class RestorePlan(msgspec.Struct, frozen=True):
    """num_blocks: to be restored, from the first that is not here on; what follows them is computed."""

    choice: RestoreChoice
    num_blocks: int
    restore_s: float
    compute_s: float
    reason: str

    @property
    def total_s(self) -> float:
        return self.restore_s + self.compute_s


class _Front(msgspec.Struct, frozen=True):
    """Restoring so many of the stored blocks, and what that takes."""

    num_blocks: int
    restore_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.restore_s + self.compute_s


def plan_restore(
    num_prompt: int,
    num_cached: int,
    parts: Sequence[StoredPart],
    tiers: Mapping[str, TierRate],
    prefill: PrefillRate,
    block_bytes: int,
) -> RestorePlan:
    """The quickest way to the KV of a prompt; of equally quick ones that which computes least.

    num_prompt: tokens; the last is always computed, because its logits are needed
    num_cached: full blocks at the front that are where they are needed
    parts:      what is stored of the blocks right after those, in their order

    Raises ValueError when cached and stored blocks leave no token of the prompt to be computed.
    """
    num_stored = sum(part.num_blocks for part in parts)
    if (num_cached + num_stored) * BLOCK_TOKENS >= num_prompt or any(part.num_blocks < 0 for part in parts):
        raise ValueError(f"{num_cached} cached and {num_stored} stored blocks do not fit {num_prompt} tokens")

    def front(num_blocks: int) -> _Front:
        restore_s = _restore_s(num_blocks, parts, tiers, block_bytes)
        start = (num_cached + num_blocks) * BLOCK_TOKENS
        return _Front(num_blocks, restore_s, prefill.seconds(start, num_prompt))

    lengths = _worth_a_look(parts, tiers, block_bytes)
    best = min(map(front, lengths), key=lambda it: (it.total_s, it.compute_s))
    choice = _choice(best.num_blocks, num_cached, num_stored)
    reason = _reason(best, front(0), front(num_stored), num_prompt, num_cached, parts)
    return RestorePlan(choice, best.num_blocks, best.restore_s, best.compute_s, reason)


def _step_features(start: int, end: int) -> tuple[float, float, float]:
    """What the terms of a PrefillRate are multiplied with for one step."""
    return 1.0, float(end - start), _look_backs(start, end)


def _look_backs(start: int, end: int) -> float:
    """Positions before them that the tokens start .. end - 1 look back at, in all."""
    return (end - start) * (start + end - 1) / 2


def _restore_s(num_blocks: int, parts: Iterable[StoredPart], tiers: Mapping[str, TierRate], block_bytes: int) -> float:
    """Tiers read at the same time, the parts of one tier after each other."""
    by_tier: dict[str, int] = {}
    for part in parts:
        taken = min(num_blocks, part.num_blocks)
        num_blocks -= taken
        if taken:
            by_tier[part.tier] = by_tier.get(part.tier, 0) + taken
    return max((tiers[tier].seconds(num * block_bytes) for tier, num in by_tier.items()), default=0.0)


def _worth_a_look(parts: Iterable[StoredPart], tiers: Mapping[str, TierRate], block_bytes: int) -> list[int]:
    """Lengths of the front of which one is the best, whatever prefill costs.

    Between two of them the restore time is a straight line, and computing saves the more per block the further the
    front goes: so an end is at least as good as all between. The line bends where a part ends, and where its tier
    begins to take longer than all others. The first block of a tier brings its latency, which those after it do not:
    whoever takes it takes them too.
    """
    lengths = [0]
    ahead_s: dict[str, float] = {}
    num_before = 0
    for part in parts:
        if not part.num_blocks:
            continue
        rate = tiers[part.tier]
        begun_s = ahead_s.get(part.tier, rate.latency_s)
        others_s = max((s for tier, s in ahead_s.items() if tier != part.tier), default=0.0)
        block_s = block_bytes * rate.byte_s
        bend = (others_s - begun_s) / block_s if block_s > 0.0 else math.inf
        inside = {part.num_blocks}
        if 0.0 < bend < part.num_blocks:
            inside |= {math.floor(bend), math.ceil(bend)}
        lengths += [num_before + length for length in sorted(inside)]
        ahead_s[part.tier] = begun_s + part.num_blocks * block_s
        num_before += part.num_blocks
    return lengths


def _choice(num_blocks: int, num_cached: int, num_stored: int) -> RestoreChoice:
    if not num_stored and num_cached:
        return RestoreChoice.REUSE
    if not num_blocks:
        return RestoreChoice.RECOMPUTE
    return RestoreChoice.RESTORE if num_blocks == num_stored else RestoreChoice.RESTORE_FRONT


def _reason(
    best: _Front, nothing: _Front, everything: _Front, num_prompt: int, num_cached: int, parts: Sequence[StoredPart]
) -> str:
    """A sentence for the timeline: what is done, what it takes, and what the others would have taken."""
    words: list[str] = []
    if num_cached:
        words.append(f"reuse {num_cached} blocks")
    if best.num_blocks:
        of_all = "all " if best is everything or best.num_blocks == everything.num_blocks else ""
        of_how_many = "" if of_all else f" of {everything.num_blocks}"
        tiers = ", ".join(dict.fromkeys(_tiers_of(best.num_blocks, parts)))
        words.append(f"restore {of_all}{best.num_blocks}{of_how_many} blocks from {tiers} in {_time(best.restore_s)}")
    num_computed = num_prompt - (num_cached + best.num_blocks) * BLOCK_TOKENS
    words.append(f"compute {num_computed} tokens in {_time(best.compute_s)}")
    others = []
    if best.num_blocks:
        others.append(f"restoring nothing takes {_time(nothing.total_s)}")
    if best.num_blocks < everything.num_blocks:
        others.append(f"restoring all {everything.num_blocks} blocks takes {_time(everything.total_s)}")
    if not everything.num_blocks:
        others.append("nothing more is stored" if num_cached else "nothing is stored")
    return ", ".join(words) + "; " + ", ".join(others)


def _tiers_of(num_blocks: int, parts: Iterable[StoredPart]) -> Iterable[str]:
    for part in parts:
        if num_blocks > 0 and part.num_blocks:
            yield part.tier
        num_blocks -= part.num_blocks


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.1f} ms"
