"""Checks, verdicts, and the report as JSON and as a table."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from load_tests.report import Check, Machine, Report, is_reached, judged, single, to_json
from load_tests.report_table import as_table

MACHINE = Machine(processor="abacus", cores=[0, 1], memory_bytes=1 << 30, kernel="6.1", busy_percent=3.2)


def report(*checks: Check, error: str | None = None, notes: tuple[str, ...] = ()) -> Report:
    return Report(
        name="speed",
        machine=MACHINE,
        versions={"python": "3.11.9"},
        settings={"rounds": "5"},
        took_s=12.345678912,
        checks=list(checks),
        error=error,
        notes=list(notes),
    )


def test_a_value_is_judged_against_its_target_from_the_better_side_and_the_target_itself_will_do():
    assert is_reached(5.0, 5.0, "lower")
    assert is_reached(4.9, 5.0, "lower")
    assert not is_reached(5.1, 5.0, "lower")
    assert is_reached(5.0, 5.0, "higher")
    assert not is_reached(4.9, 5.0, "higher")


def test_without_a_target_there_is_no_verdict():
    check = judged("rate", [1.0, 3.0, 2.0], "token/s", "higher")
    assert (check.value, check.target, check.ok) == (2.0, None, None)


def test_the_spread_of_a_median_is_its_p10_and_p90():
    check = judged("rate", [float(n) for n in range(11)], "token/s", "higher", 4.0)
    assert (check.value, check.spread, check.num_samples, check.ok) == (5.0, (1.0, 9.0), 11, True)


def test_a_single_value_has_no_spread():
    assert single("p99", 8.0, "ms", "lower", 5.0, num_samples=120) == Check(
        name="p99", value=8.0, unit="ms", target=5.0, better="lower", ok=False, spread=None, num_samples=120
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_no_value(value):
    with pytest.raises(ValueError, match="share"):
        single("share", value, "", "higher")
    with pytest.raises(ValueError, match="share"):
        single("share", 1.0, "", "higher", value)


def test_a_report_is_ok_unless_a_target_was_missed_or_it_broke_off():
    good, free = single("a", 1.0, "", "higher", 1.0), single("b", 0.0, "", "higher")
    bad = single("c", 0.9, "", "higher", 1.0)
    assert report(good, free).is_ok
    assert not report(good, bad).is_ok
    assert report(good, bad).missed == [bad]
    assert not report(error="no cluster").is_ok


def test_as_json_a_report_is_one_object_with_the_promised_fields():
    tree = json.loads(to_json(report(single("a", 1 / 3, "ms", "lower", 5.0))))
    assert {"name", "machine", "versions", "checks"} <= tree.keys()
    assert {"name", "value", "unit", "target", "better", "ok"} <= tree["checks"][0].keys()
    assert tree["checks"][0]["value"] == 0.333333
    assert tree["checks"][0]["ok"] is True
    assert msgspec.convert(tree, Report).checks[0].target == 5.0


def test_several_reports_are_a_list():
    assert [one["name"] for one in json.loads(to_json([report(), report()]))] == ["speed", "speed"]


def test_the_table_shows_value_target_and_verdict_and_ends_with_what_was_missed():
    shown = as_table(report(single("quick", 4.0, "ms", "lower", 5.0), judged("slow", [0.00012], "", "higher", 2.0)))
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["quick"].split()[1:] == ["4", "ms", "<=", "5", "ok"]
    assert lines["slow"].split()[1:] == ["0.00012", "0.00012", "..", "0.00012", ">=", "2", "MISSED"]
    assert shown.splitlines()[-1] == "1 of 2 targets missed: slow"


def test_the_table_of_a_bench_that_broke_off_says_why():
    assert as_table(report(error="no cluster")).splitlines()[-1] == "did not come to its end: no cluster"


def test_what_could_not_be_measured_stands_in_the_table_and_is_no_miss():
    shown = report(single("a", 1.0, "", "higher", 1.0), notes=("no figures of nixl: it is not installed",))
    assert as_table(shown).splitlines()[-2:] == ["no figures of nixl: it is not installed", "all 1 targets reached"]
    assert json.loads(to_json(shown))["notes"] == ["no figures of nixl: it is not installed"]
    assert shown.is_ok
