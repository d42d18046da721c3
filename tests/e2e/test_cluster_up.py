"""`kvrelay up` as its user meets it: a process, a port, Ctrl-C, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.timeout(120)

KVRELAY = Path(sys.executable).parent / "kvrelay"
READY_S = 60.0
GRACE_S = 10.0
TEMP = Path("/tmp")  # noqa: S108 - looked at only
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class Running:
    """A `kvrelay up` in a session of its own, as a terminal would start it, and every process that came from it."""

    def __init__(self, home: Path, *flags: str, config: dict[str, Any]) -> None:
        self.home = home
        self.temp_before = set(TEMP.iterdir())
        self.shm_before = set(SHARED_MEMORY.iterdir())
        file = home / "kvrelay.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "RAY_"))}
        self.process = subprocess.Popen(
            [KVRELAY, "up", "--json", "--config", file, *flags],
            stdout=subprocess.PIPE,
            stderr=(home / "stderr").open("w"),
            env=environment | {"HOME": str(home)},
            start_new_session=True,
            text=True,
        )
        self.family: list[psutil.Process] = []

    @property
    def stderr(self) -> str:
        return (self.home / "stderr").read_text()

    def wait_ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.look()
        ready: dict[str, Any] = json.loads(line)
        assert ready["event"] == "ready", ready
        return ready

    def look(self) -> None:
        """Remembers every process that there is now."""
        me = psutil.Process(self.process.pid)
        self.family += [me, *me.children(recursive=True)]

    def press_ctrl_c(self) -> None:
        """A terminal sends SIGINT to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_end(self, deadline_s: float) -> int:
        return self.process.wait(timeout=deadline_s)

    def assert_nothing_left(self) -> None:
        assert [process for process in self.family if process.is_running()] == []
        assert [process for process in psutil.process_iter() if _session_of(process) == self.process.pid] == []
        assert [path for path in set(TEMP.iterdir()) - self.temp_before if path.name.startswith("kvrelay")] == []
        assert set(SHARED_MEMORY.iterdir()) <= self.shm_before
        assert not (self.home / ".ray").exists()
        run = self.home / ".local" / "state" / "kvrelay" / "run"
        assert not run.exists() or list(run.iterdir()) == []

    def end_for_certain(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.look()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess, PermissionError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return os.getsid(process.pid)
    return None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    runs: list[Running] = []

    def begin(*flags: str, **config: dict[str, Any]) -> Running:
        home = tmp_path / f"home-{len(runs)}"
        home.mkdir()
        tree = {"model": {"path": "fake"}, "router": {"port": 0}}
        for name, section in config.items():
            tree[name] = tree.get(name, {}) | section
        runs.append(Running(home, *flags, config=tree))
        return runs[-1]

    yield begin
    for run in runs:
        run.end_for_certain()


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]} | fields
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=10.0)


def test_ctrl_c_ends_a_serving_cluster_and_leaves_nothing(start):
    run = start()
    ready = run.wait_ready()
    answer = ask(ready["url"], max_tokens=3)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
    assert {worker["name"] for worker in ready["workers"]} == {"prefill-0", "decode-0"}

    # while it runs it is closed to everybody else
    listening = [
        connection.laddr.ip
        for process in run.family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 5
    assert set(listening) <= set(LOOPBACK)
    ray_folder = _option(run.family, "--temp-dir=").parent
    assert stat.S_IMODE(ray_folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((ray_folder / "token").stat().st_mode) == 0o600
    state = run.home / ".local" / "state" / "kvrelay"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700

    run.press_ctrl_c()
    assert run.wait_end(GRACE_S + 2.0) == 0
    run.assert_nothing_left()
    assert not ray_folder.exists()
    events = [json.loads(line) for log in state.glob("logs/*-cluster.jsonl") for line in log.open()]
    assert {"ready", "stopping", "cluster stopped"} <= {event["message"] for event in events}


def _option(processes: list[psutil.Process], prefix: str) -> Path:
    words = [word for process in processes for word in process.cmdline()]
    return Path(next(word.removeprefix(prefix) for word in words if word.startswith(prefix)))


def test_a_second_ctrl_c_does_not_wait_for_running_requests(start):
    run = start(model={"path": "fake", "fake": {"step_s": 0.5}})
    url = run.wait_ready()["url"]
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 200}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20.0) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        run.press_ctrl_c()
        time.sleep(1.0)
        assert run.process.poll() is None  # the stream may go on for the grace time
        began_s = time.monotonic()
        run.press_ctrl_c()
        for _ in lines:
            pass
    assert run.wait_end(GRACE_S) == 0
    assert time.monotonic() - began_s < 6.0
    run.assert_nothing_left()


def test_sigterm_during_the_start_leaves_nothing(start):
    run = start()
    deadline_s = time.monotonic() + READY_S
    while not any("raylet" in process.name() for process in run.family):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
        run.look()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait_end(GRACE_S + 2.0) == 0
    run.assert_nothing_left()


def test_a_second_ctrl_c_while_ray_starts_ends_at_once_and_leaves_nothing(start):
    run = start()
    deadline_s = time.monotonic() + READY_S
    while not any("gcs_server" in process.name() for process in run.family):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
        run.look()
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(0.2)  # two signals at once would count as one
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait_end(2.0) == 130
    run.assert_nothing_left()


def test_a_port_in_use_is_named_within_seconds(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = start("--port", str(port))
        assert run.wait_end(15.0) == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in run.stderr


def test_a_model_that_is_not_there_is_named_within_seconds_and_nothing_is_left(start):
    run = start("--model", "/nowhere/model.gguf")
    assert run.wait_end(15.0) == 2
    assert "there is no model at /nowhere/model.gguf" in run.stderr
    assert "Traceback" not in run.stderr
    run.assert_nothing_left()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_when_ray_itself_dies_the_run_says_so_and_ends_and_nothing_is_left(start, name):
    run = start()
    run.wait_ready()
    next(process for process in run.family if process.name() == name).kill()
    assert run.wait_end(5.0) == 1
    assert f"kvrelay: Ray's {name} died" in run.stderr
    assert "Traceback" not in run.stderr
    run.assert_nothing_left()
    assert run.process.stdout is not None
    assert json.loads(run.process.stdout.readline())["event"] == "error"
    log = next((run.home / ".local" / "state" / "kvrelay" / "logs").glob("*-cluster.jsonl"))
    assert f"Ray's {name} died" in json.loads(log.read_text().splitlines()[-1])["message"]
