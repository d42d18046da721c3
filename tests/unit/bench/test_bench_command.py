"""`kvrelay bench` with benches that measure nothing: what it prints, writes and ends with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from cluster.commands import kvrelay
from load_tests import all_benches, running
from load_tests.all_benches import all_benches as real_benches
from load_tests.engine_bench import EngineBench
from load_tests.lab import Bench, Lab
from load_tests.report import Check, Report, single
from pd_core.errors import Unavailable


class Quick:
    """Its one check is reached when there are at least two rounds."""

    name = "quick"
    summary = "nothing at all"
    num_rounds = 5

    async def run(self, lab: Lab) -> list[Check]:
        lab.progress("measuring nothing")
        return [single("rounds", len(lab.rounds()), "", "higher", 2.0)]


class Broken(Quick):
    name = "broken"

    async def run(self, lab: Lab) -> list[Check]:
        raise Unavailable("no cluster to be had")


class Endless(Quick):
    name = "endless"

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended

    async def run(self, lab: Lab) -> list[Check]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            self._ended.append("cluster stopped")
        return []


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "BUSY_LOOK_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def ask(monkeypatch: pytest.MonkeyPatch, benches: list[Bench], *words: str) -> Result:
    monkeypatch.setattr(all_benches, "all_benches", lambda: {bench.name: bench for bench in benches})
    return CliRunner().invoke(kvrelay, ["bench", "--model", "fake", *words])


def test_the_list_names_every_bench_with_a_sentence():
    result = CliRunner().invoke(kvrelay, ["bench", "--list"])
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == list(real_benches())
    assert set(names) == {"engine", "ttft", "transfer", "handoff", "serving", "router", "fairness", "pools", "mixed"}


@pytest.mark.parametrize("words", [[], ["slow"]])
def test_a_bench_that_there_is_not_is_refused_with_those_there_are(monkeypatch, words):
    result = ask(monkeypatch, [Quick()], *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "quick, all" in result.stderr


def test_as_json_it_prints_one_object_and_the_table_goes_to_standard_error(monkeypatch):
    result = ask(monkeypatch, [Quick()], "quick", "--json")
    assert result.exit_code == 0
    report = msgspec.json.decode(result.stdout, type=Report)
    assert (report.name, report.checks[0].value, report.settings["model"]) == ("quick", 5.0, "fake")
    assert report.machine.cores == sorted(os.sched_getaffinity(0))
    assert report.versions["python"].startswith("3.")
    assert "measuring nothing" in result.stderr
    assert "all 1 targets reached" in result.stderr


def test_a_missed_target_is_exit_status_1(monkeypatch):
    result = ask(monkeypatch, [Quick()], "quick", "--rounds", "1")
    assert result.exit_code == 1
    assert "1 of 1 targets missed: rounds" in result.stdout


def test_all_goes_on_after_a_bench_that_breaks_off_and_writes_every_report(monkeypatch, tmp_path):
    output = tmp_path / "benchmarks" / "latest.json"
    result = ask(monkeypatch, [Broken(), Quick()], "all", "--output", str(output))
    assert result.exit_code == 1
    broken, quick = msgspec.json.decode(output.read_bytes(), type=list[Report])
    assert (broken.name, broken.error, broken.checks) == ("broken", "Unavailable: no cluster to be had", [])
    assert quick.is_ok
    assert "did not come to its end: Unavailable: no cluster to be had" in result.stdout


def test_a_wrong_config_is_exit_status_2_before_anything_is_measured(monkeypatch, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("decode: {max_batch: 0}")
    result = ask(monkeypatch, [Quick()], "quick", "--config", str(file))
    assert result.exit_code == 2
    assert "decode.max_batch" in result.stderr


def test_sigterm_ends_what_the_bench_has_started_and_then_the_command(monkeypatch):
    ended: list[str] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = ask(monkeypatch, [Endless(ended)], "endless")
    assert (result.exit_code, ended) == (130, ["cluster stopped"])
    assert result.stdout == ""
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


def test_the_engine_bench_says_that_the_fake_engine_has_no_floor(monkeypatch):
    result = ask(monkeypatch, [EngineBench()], "engine", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == "ConfigError: the fake engine has no floor"
