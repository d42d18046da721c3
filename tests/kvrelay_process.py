"""`kvrelay up` as its user meets it: a process in a session of its own, and every process that came from it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

KVRELAY = Path(sys.executable).parent / "kvrelay"
READY_S = 60.0
GRACE_S = 10.0
END_S = GRACE_S + 2.0
"""From Ctrl-C until nothing is left."""
TEMP = Path("/tmp")  # noqa: S108 - looked at only
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
POLL_S = 0.05
FAKE = {"model": {"path": "fake"}, "router": {"port": 0}}


class KvrelayProcess:
    """Started as a terminal would start it, in a home of its own.

    flags:  after `kvrelay up --json --config FILE`
    config: sections over those of FAKE
    cache:  where converted models and kernels lie; None is an empty one in the home
    around: words before the command, like ["unshare", "-m"]
    """

    def __init__(
        self, home: Path, *flags: str, config: dict[str, dict[str, Any]], cache: Path | None, around: list[str]
    ) -> None:
        self.home = home
        self.temp_before = set(TEMP.iterdir())
        self.shm_before = set(SHARED_MEMORY.iterdir())
        tree = {name: FAKE.get(name, {}) | config.get(name, {}) for name in FAKE | config}
        file = home / "kvrelay.yaml"
        file.write_text(json.dumps(tree))  # JSON is YAML
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "RAY_"))}
        environment["HOME"] = str(home)
        if cache is not None:
            environment["XDG_CACHE_HOME"] = str(cache)
        with (home / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [*around, str(KVRELAY), "up", "--json", "--config", str(file), *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=True,
                text=True,
            )
        self.family: list[psutil.Process] = []

    @property
    def state(self) -> Path:
        return self.home / ".local" / "state" / "kvrelay"

    @property
    def stderr(self) -> str:
        return (self.home / "stderr").read_text()

    def read_event(self) -> dict[str, Any]:
        """The next object on its standard output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.look()
        event: dict[str, Any] = json.loads(line) if line else {"event": "none", "stderr": self.stderr}
        return event

    def wait_ready(self) -> dict[str, Any]:
        ready = self.read_event()
        assert ready["event"] == "ready", ready
        return ready

    def wait_until(self, condition: Callable[[], bool], within_s: float = READY_S) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, self.stderr
            time.sleep(POLL_S)
            self.look()

    def has(self, name: str) -> bool:
        """Whether a process of this name has come from it."""
        return any(name in _name_of(process) for process in self.family)

    def look(self) -> None:
        """Remembers every process that there is now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.process.pid)
            found = [me, *me.children(recursive=True)]
            self.family += [process for process in found if process not in self.family]

    def press_ctrl_c(self) -> None:
        """A terminal sends SIGINT to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_end(self, deadline_s: float) -> int:
        return self.process.wait(timeout=deadline_s)

    def end_by_ctrl_c(self) -> None:
        """As a user ends it: status 0 in time, and nothing is left."""
        self.press_ctrl_c()
        assert self.wait_end(END_S) == 0
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        assert [process for process in self.family if process.is_running()] == []
        assert [process for process in psutil.process_iter() if _session_of(process) == self.process.pid] == []
        assert [path for path in set(TEMP.iterdir()) - self.temp_before if _is_abandoned(path)] == []
        assert set(SHARED_MEMORY.iterdir()) <= self.shm_before
        assert not (self.home / ".ray").exists()
        run = self.state / "run"
        assert not run.exists() or list(run.iterdir()) == []

    def end_for_certain(self) -> None:
        self.look()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def ask(url: str, **fields: Any) -> httpx.Response:
    """One chat request to the fake model."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]} | fields
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20.0)


def _name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def _is_abandoned(path: Path) -> bool:
    """A folder of a kvrelay that does not run any more. Others may run beside this test."""
    owner = path / "owner"
    if not path.name.startswith("kvrelay") or not owner.exists():
        return False
    with owner.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess, PermissionError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return os.getsid(process.pid)
    return None
