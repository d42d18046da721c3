"""Ending processes for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from cluster.processes import ProcessHandle, kill_remaining, list_descendants

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)",
]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


async def test_a_stopped_process_is_killed_and_seen_to_be_gone(child):
    handle = ProcessHandle(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert not await handle.wait_gone(0.05)
    handle.kill()
    assert await handle.wait_gone(5.0)
    assert child.wait() == -signal.SIGKILL
    handle.kill()  # gone already: nothing happens
    assert await handle.wait_gone(0.0)


async def test_a_process_that_ended_before_is_gone(child):
    child.kill()
    child.wait()
    handle = ProcessHandle(child.pid)
    handle.kill()
    assert await handle.wait_gone(0.0)


async def test_a_handle_cannot_hit_whoever_gets_the_pid_next(child):
    handle = ProcessHandle(child.pid)
    child.kill()
    child.wait()
    handle.kill()
    assert await handle.wait_gone(1.0)
    handle.close()


def test_descendants_that_do_not_end_by_themselves_are_killed():
    child = subprocess.Popen(STUBBORN, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    ours = [process for process in list_descendants() if process.pid == child.pid]
    assert len(ours) == 1
    child.terminate()
    began_s = time.monotonic()
    assert kill_remaining(ours, grace_s=0.1) == []
    assert time.monotonic() - began_s < 2.0
    child.stdout.close()
    assert not psutil.pid_exists(child.pid)
    child.wait()
