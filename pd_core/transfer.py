"""What was moved over which path, and how fast paths are."""

from __future__ import annotations

import msgspec


class PathTransfer(msgspec.Struct, frozen=True):
    """KV bytes of one handoff that went over one path, and the seconds that they were on it, without waiting."""

    path: str
    num_bytes: int
    seconds: float


class PathTotals(msgspec.Struct, frozen=True):
    """All pushes of one worker over one path since its boot.

    num_pushes, num_bytes, seconds: of those that got through; seconds on the path, without waiting for a turn
    failures:   how many did not, by the code of their error
    instead_of: how many of those that got through went this way because a better path did not work, by its name
    """

    num_pushes: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = {}
    instead_of: dict[str, int] = {}


class ProbedPath(msgspec.Struct, frozen=True):
    """One path from a worker to another, as a probe found it.

    reason:      why it does not work; None when it does
    bytes_per_s: of the probe's blocks, from the push to the receiver's word that it has all; digests among it where on
    latency_s:   of one block, likewise
    """

    path: str
    reason: str | None = None
    bytes_per_s: float | None = None
    latency_s: float | None = None
