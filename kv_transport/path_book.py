"""What is known of the paths to each receiver: which failed, why, and when to try it again. Pure: `now_s` comes in.

(unknown) --failed--> backing off --time--> worth a try --failed--> backing off, twice as long
    `-----------------------`------ worked ------`-----------------> good
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
MAX_RECEIVERS = 256
"""Receivers that are remembered; the one that was asked about longest ago is forgotten for a new one."""


class PathRecord(msgspec.Struct, frozen=True):
    """One path to one boot of a receiver.

    num_failures: in a row, since it worked last
    retry_s:      not to be tried before, unless nothing better is left
    reason:       of the last failure; None while it works
    """

    num_failures: int = 0
    retry_s: float = 0.0
    reason: str | None = None


WORKS = PathRecord()


class PathBook:
    """By the incarnation of the receiver: another boot, on whatever host, is another receiver."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, PathRecord]] = {}

    def order(self, incarnation: str, paths: Sequence[str], now_s: float) -> list[str]:
        """All of `paths`, given best first: those that may be tried in their order, then the others, soonest first."""
        known = self._known(incarnation)
        late = sorted(
            (path for path in paths if known.get(path, WORKS).retry_s > now_s), key=lambda path: known[path].retry_s
        )
        return [path for path in paths if path not in late] + late

    def worked(self, incarnation: str, path: str) -> bool:
        """Whether that is news."""
        known = self._known(incarnation)
        is_news = known.get(path) != WORKS
        known[path] = WORKS
        return is_news

    def failed(self, incarnation: str, path: str, reason: str, now_s: float) -> PathRecord:
        """What is known of it now."""
        known = self._known(incarnation)
        num_failures = known.get(path, WORKS).num_failures + 1
        wait_s = min(FIRST_RETRY_S * 2.0 ** min(num_failures - 1, 16), LONGEST_RETRY_S)
        known[path] = PathRecord(num_failures, now_s + wait_s, reason)
        return known[path]

    def report(self) -> dict[str, dict[str, PathRecord]]:
        """Everything, by incarnation and path."""
        return {incarnation: dict(known) for incarnation, known in self._records.items()}

    def describe(self, incarnation: str, best_first: Sequence[str]) -> str:
        """One line for people, as "tcp (shm failed, 2 in a row: nobody listens)"; empty before the first push.

        Of those that work only the best is named: the others worked while it did not, or when they were probed.
        """
        known = self._records.get(incarnation, {})
        failures = "; ".join(
            f"{path} failed, {record.num_failures} in a row: {record.reason}"
            for path, record in known.items()
            if record != WORKS
        )
        works = next((path for path in best_first if known.get(path) == WORKS), "none" if failures else "")
        return f"{works} ({failures})" if failures else works

    def _known(self, incarnation: str) -> dict[str, PathRecord]:
        known = self._records.pop(incarnation, {})
        while len(self._records) >= MAX_RECEIVERS:
            del self._records[next(iter(self._records))]
        self._records[incarnation] = known  # the last one is the one asked about last
        return known
