"""`kvrelay bench` as its user meets it, with clusters of the fake engine: a valid report, and nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from load_tests.report import Report

pytestmark = pytest.mark.timeout(120)

KVRELAY = Path(sys.executable).parent / "kvrelay"
CONFIG = "model: {path: fake, fake: {step_s: 0.002, context_tokens: 4096}}"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    file = tmp_path / "fake.yaml"
    file.write_text(CONFIG)
    return [str(KVRELAY), "bench", "--config", str(file), "--rounds", "1", "--json"]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "RAY_"))}
    return environment | {"HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("router", "router_cpu_per_token_16_streams"),
        ("ttft", "ttft_2048_added"),
        ("transfer", "shm_100_blocks_of_bare"),
        ("handoff", "tcp_exposed_4000_beyond_limit"),
    ],
)
def test_a_bench_over_a_fake_cluster_yields_a_valid_report(command, home, name, promised):
    result = subprocess.run([*command, name], env=home, capture_output=True, text=True, timeout=110, check=False)
    report = msgspec.json.decode(result.stdout, type=Report)
    assert (report.name, report.error) == (name, None), result.stderr
    checks = {check.name: check for check in report.checks}
    assert checks[promised].ok is not None
    assert checks["bound_memcpy"].value > 0
    assert result.returncode == (0 if report.is_ok else 1)
    assert processes_at(home["HOME"]) == []


def test_sigterm_in_the_middle_ends_cluster_and_bench_and_leaves_nothing(command, home):
    bench = subprocess.Popen([*command, "router"], env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert bench.stderr is not None
    assert bench.stdout is not None
    try:
        for line in bench.stderr:
            if "router round 1" in line:
                break
        family = psutil.Process(bench.pid).children(recursive=True)
        assert family
        began_s = time.monotonic()
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(timeout=40) == 130
        assert time.monotonic() - began_s < 20
        assert bench.stdout.read() == ""
        assert [process for process in family if process.is_running()] == []
        assert processes_at(home["HOME"]) == []
    finally:
        bench.kill()
        bench.wait()
        bench.stdout.close()
        bench.stderr.close()


def processes_at(home: str) -> list[psutil.Process]:
    """Those that call this folder their home: all that came from the command."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("HOME") == home:
                found.append(process)
    return found
