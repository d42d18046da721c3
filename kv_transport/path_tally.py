"""Counts what pushes over each path came to. Pure."""

from __future__ import annotations

from collections import Counter

from pd_core.transfer import PathTotals


class PathTally:
    """Totals by path; they only grow."""

    def __init__(self) -> None:
        self._num_pushes: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._failures: dict[str, Counter[str]] = {}
        self._instead_of: dict[str, Counter[str]] = {}

    def got_through(self, path: str, best: str, num_bytes: int, seconds: float) -> None:
        """A push went over `path`. best: what it would have taken if all paths worked"""
        self._num_pushes[path] += 1
        self._num_bytes[path] += num_bytes
        self._seconds[path] = self._seconds.get(path, 0.0) + seconds
        if path != best:
            self._instead_of.setdefault(path, Counter())[best] += 1

    def failed(self, path: str, code: str) -> None:
        """A push over `path` did not get through; code: of its error"""
        self._failures.setdefault(path, Counter())[code] += 1

    def totals(self) -> dict[str, PathTotals]:
        """Of every path that was tried."""
        return {
            path: PathTotals(
                num_pushes=self._num_pushes[path],
                num_bytes=self._num_bytes[path],
                seconds=self._seconds.get(path, 0.0),
                failures=dict(self._failures.get(path, {})),
                instead_of=dict(self._instead_of.get(path, {})),
            )
            for path in sorted(self._num_pushes.keys() | self._failures.keys())
        }
