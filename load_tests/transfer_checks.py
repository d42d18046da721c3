"""What the transfer bench says of its samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from load_tests.report import Check, judged
from load_tests.transfer_ways import CALL, MANY, SMALL, WAYS, Shape, Way

GIGA = 1e9

Samples: TypeAlias = Mapping[tuple[str, str], Sequence[float]]
"""Seconds by the names of way and shape, one number a round."""


def checks_of(samples: Samples) -> list[Check]:
    """Rates, latencies and the judged ratios, for the ways that there are samples of."""
    measured = [(way, shape) for way in WAYS for shape in way.shapes if (way.name, shape.name) in samples]
    checks = [_speed(way, shape, samples[way.name, shape.name]) for way, shape in measured]
    return checks + [
        _share(way, samples[way.name, MANY.name], samples[way.bare, MANY.name])
        for way, shape in measured
        if shape == MANY and way.bare is not None and (way.bare, MANY.name) in samples
    ]


def _speed(way: Way, shape: Shape, took_s: Sequence[float]) -> Check:
    """GB a second; microseconds for what is small: there the way decides, not the bytes."""
    name = way.name if shape == CALL else f"{way.name}_{shape.name}"
    if shape in (CALL, SMALL):
        return judged(name, [seconds * 1e6 for seconds in took_s], "us", "lower")
    return judged(name, [shape.num_bytes / seconds / GIGA for seconds in took_s], "GB/s", "higher")


def _share(way: Way, took_s: Sequence[float], bare_s: Sequence[float]) -> Check:
    """Of the bare pair's speed; each round compares its own."""
    shares = [bare / own for own, bare in zip(took_s, bare_s, strict=True)]
    return judged(f"{way.name}_{MANY.name}_of_bare", shares, "", "higher", way.target)
