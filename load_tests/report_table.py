"""A report for people: one line for each check. Pure."""

from __future__ import annotations

from load_tests.report import Check, Report

VERDICTS = {True: "ok", False: "MISSED", None: ""}
SIGNS = {"lower": "<=", "higher": ">="}


def as_table(report: Report) -> str:
    """Name, value, spread, target and verdict; what the machine is above, notes and what was missed below."""
    machine = report.machine
    heading = (
        f"{report.name}: {machine.processor}, {len(machine.cores)} cores, "
        f"{machine.busy_percent:.0f} % busy before, took {report.took_s:.0f} s"
    )
    rows = [("check", "value", "p10 .. p90", "target", ""), *(_row(check) for check in report.checks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([heading, rule, lines[0], rule, *lines[1:], rule, *report.notes, _verdict(report)]) + "\n"


def _row(check: Check) -> tuple[str, str, str, str, str]:
    spread = "" if check.spread is None else f"{_number(check.spread[0])} .. {_number(check.spread[1])}"
    target = "" if check.target is None else f"{SIGNS[check.better]} {_number(check.target)}"
    return check.name, f"{_number(check.value)} {check.unit}".rstrip(), spread, target, VERDICTS[check.ok]


def _verdict(report: Report) -> str:
    if report.error is not None:
        return f"did not come to its end: {report.error}"
    targets = [check for check in report.checks if check.target is not None]
    if not report.missed:
        return f"all {len(targets)} targets reached"
    return f"{len(report.missed)} of {len(targets)} targets missed: " + ", ".join(c.name for c in report.missed)


def _number(value: float) -> str:
    """Four digits that matter, never with an exponent."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{float(f'{value:.4g}'):.6f}".rstrip("0").rstrip(".")
