"""What a bench says: named values with their targets, and where they were measured. Pure.

One report is one JSON object: {name, machine, versions, checks: [{name, value, unit, target, better, ok, ...}], ...}.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from load_tests.summary import Summary, summarise

Better = Literal["lower", "higher"]


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value that was measured.

    target: what it is to reach, None where nothing is promised; then `ok` is None too
    better: on which side of the target it has to lie; the target itself is good enough
    spread: p10 and p90 of the samples whose median `value` is; None where it is no median
    """

    name: str
    value: float
    unit: str
    target: float | None
    better: Better
    ok: bool | None
    spread: tuple[float, float] | None
    num_samples: int


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it ran. cores: ids that the bench may use; busy_percent: of all cores, just before anything was started."""

    processor: str
    cores: list[int]
    memory_bytes: int
    kernel: str
    busy_percent: float


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of one bench.

    versions: of kvrelay, Python and the libraries that decide the speed
    settings: what of the bench itself could be chosen
    error:    why it did not come to its end; the checks are those that it had by then
    notes:    what the checks do not say: something that could not be measured here, and why
    """

    name: str
    machine: Machine
    versions: dict[str, str]
    settings: dict[str, str]
    took_s: float
    checks: list[Check]
    error: str | None = None
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """It came to its end, and no check missed its target."""
        return self.error is None and all(check.ok is not False for check in self.checks)

    @property
    def missed(self) -> list[Check]:
        return [check for check in self.checks if check.ok is False]


def is_reached(value: float, target: float, better: Better) -> bool:
    """The target itself counts as reached."""
    return value <= target if better == "lower" else value >= target


def single(
    name: str, value: float, unit: str, better: Better, target: float | None = None, *, num_samples: int = 1
) -> Check:
    """A value that is no median: a quantile, a count, a rate over a whole run.

    Raises ValueError for a value or a target that is no number.
    """
    return _check(name, value, unit, better, target, None, num_samples)


def judged(name: str, samples: Sequence[float], unit: str, better: Better, target: float | None = None) -> Check:
    """The median of the samples, with their spread. Raises ValueError without samples, or for one that is no number."""
    summary: Summary = summarise(samples)
    return _check(name, summary.median, unit, better, target, (summary.low, summary.high), summary.num_samples)


def _check(
    name: str,
    value: float,
    unit: str,
    better: Better,
    target: float | None,
    spread: tuple[float, float] | None,
    num_samples: int,
) -> Check:
    if not math.isfinite(value) or (target is not None and not math.isfinite(target)):
        raise ValueError(f"{name}: {value} with target {target}")
    ok = None if target is None else is_reached(value, target, better)
    return Check(name, value, unit, target, better, ok, spread, num_samples)


def to_json(reports: Report | Sequence[Report]) -> str:
    """One object for one report, else a list; indented, numbers with six digits that matter, a newline at the end."""
    builtins = msgspec.to_builtins(reports if isinstance(reports, Report) else list(reports))
    return msgspec.json.format(msgspec.json.encode(_rounded(builtins)), indent=1).decode() + "\n"


def _rounded(tree: object) -> object:
    match tree:
        case dict():
            return {key: _rounded(value) for key, value in tree.items()}
        case list() | tuple():
            return [_rounded(value) for value in tree]
        case float():
            return float(f"{tree:.6g}")
        case _:
            return tree
