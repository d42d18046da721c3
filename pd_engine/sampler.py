"""Draws a token from one row of logits: a pure function of (logits, parameters, absolute position).

Order, for temperature > 0:
1. logits / temperature, softmax in float64
2. top_k: the k likeliest stay; among equals the lowest ids
3. top_p: of these, likeliest first, the shortest run whose share of the mass after top_k reaches top_p
4. min_p: of these, those at least min_p x as likely as the likeliest
5. inverse of the cumulative distribution over what is left, ids ascending, at `philox.uniform(seed, position)`
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pd_core.errors import EngineError
from pd_core.request import SamplingParams
from pd_engine.philox import uniform

_FIRST_HEAD = 256
"""top_p looks at this many likeliest tokens before it sorts the whole vocabulary; the result is the same."""


def draw(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The token at `position`. logits: [vocab_size]. Raises EngineError when a logit is NaN or none is finite."""
    highest = float(logits.max())
    if not np.isfinite(highest):
        raise EngineError(f"logits for position {position} hold {highest}: no token can be drawn")
    if params.temperature == 0.0:
        return int(np.flatnonzero(logits == highest)[0])
    weights = np.exp((logits.astype(np.float64) - highest) / params.temperature)
    ids = kept_ids(weights, params)
    return _invert(weights, ids, uniform(params.seed, position))


def kept_ids(weights: NDArray[np.float64], params: SamplingParams) -> NDArray[np.intp] | None:
    """Ids that survive top_k, top_p and min_p, ascending; None when no filter is on. weights need no sum of 1."""
    ids: NDArray[np.intp] | None = None
    if 0 < params.top_k < weights.size:
        ids = _likeliest(weights, params.top_k)[: params.top_k]
    if params.top_p < 1.0:
        ids = _top_p(weights, ids, params.top_p)
    if params.min_p > 0.0:
        candidates = np.arange(weights.size) if ids is None else ids
        ids = candidates[weights[candidates] >= params.min_p * weights.max()]
    return None if ids is None else np.sort(ids)


def _likeliest(weights: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """At least `count` ids, likeliest first, equals by id: all that are as likely as the `count`-th."""
    if count >= weights.size:
        ids = np.arange(weights.size)
    else:
        edge = np.partition(weights, weights.size - count)[weights.size - count]
        ids = np.flatnonzero(weights >= edge)
    return ids[np.lexsort((ids, -weights[ids]))]


def _top_p(weights: NDArray[np.float64], ids: NDArray[np.intp] | None, top_p: float) -> NDArray[np.intp]:
    if ids is not None:
        wanted = top_p * weights[ids].sum()
        return ids[: _run_length(weights[ids], wanted)]
    wanted = top_p * weights.sum()
    for count in (_FIRST_HEAD, weights.size):
        head = _likeliest(weights, count)
        if head.size == weights.size or weights[head].sum() > wanted:
            break
    return head[: _run_length(weights[head], wanted)]


def _run_length(weights: NDArray[np.float64], wanted: float) -> int:
    """Length, at least 1, of the shortest run from the front whose sum is `wanted`."""
    reached = int(np.searchsorted(np.cumsum(weights), wanted, side="left"))
    return min(reached + 1, weights.size)


def _invert(weights: NDArray[np.float64], ids: NDArray[np.intp] | None, chance: float) -> int:
    cumulative = np.cumsum(weights if ids is None else weights[ids])
    index = int(np.searchsorted(cumulative, chance * cumulative[-1], side="right"))
    # chance < 1, but its product may round up to the sum itself: the last token of any weight is meant then
    index = min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
    return index if ids is None else int(ids[index])
