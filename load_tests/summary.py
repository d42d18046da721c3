"""Medians, quantiles and spread of a handful of measurements. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

SPREAD = (0.1, 0.9)
"""Quantiles that tell how far measurements lie apart: p10 and p90."""


class Summary(msgspec.Struct, frozen=True):
    """median: of all samples; low, high: their p10 and p90"""

    median: float
    low: float
    high: float
    num_samples: int


def quantile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` of the samples lie, 0 <= share <= 1; between two samples it is interpolated.

    Raises ValueError without samples, for a share that is none, and for samples that are no numbers.
    """
    if not samples:
        raise ValueError("a quantile of nothing")
    if not 0 <= share <= 1:
        raise ValueError(f"{share} is not a share of 1")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"not all of them are numbers: {list(samples)}")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Not low + (high - low) * part: that can leave the range of the two by a rounding.
    return min(max(low * (below + 1 - place) + high * (place - below), low), high)


def median(samples: Sequence[float]) -> float:
    """Raises ValueError as `quantile` does."""
    return quantile(samples, 0.5)


def summarise(samples: Sequence[float]) -> Summary:
    """Raises ValueError as `quantile` does."""
    low, high = (quantile(samples, share) for share in SPREAD)
    return Summary(median(samples), low, high, len(samples))


def gaps(moments: Sequence[float]) -> list[float]:
    """From each moment to the next, in order of time, whatever order they come in."""
    ordered = sorted(moments)
    return [later - earlier for earlier, later in itertools.pairwise(ordered)]
