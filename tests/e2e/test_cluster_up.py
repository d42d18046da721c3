"""`kvrelay up` as its user meets it: a process, a port, Ctrl-C, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
from pathlib import Path

import httpx
import psutil
import pytest
from kvrelay_process import END_S, GRACE_S, ask

pytestmark = pytest.mark.timeout(120)

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def test_ctrl_c_ends_a_serving_cluster_and_leaves_nothing(kvrelay_up):
    run = kvrelay_up()
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
    assert stat.S_IMODE(run.state.stat().st_mode) == 0o700

    run.end_by_ctrl_c()
    assert not ray_folder.exists()
    events = [json.loads(line) for log in run.state.glob("logs/*-cluster.jsonl") for line in log.open()]
    assert {"ready", "stopping", "cluster stopped"} <= {event["message"] for event in events}


def _option(processes: list[psutil.Process], prefix: str) -> Path:
    words = [word for process in processes for word in process.cmdline()]
    return Path(next(word.removeprefix(prefix) for word in words if word.startswith(prefix)))


def test_a_second_ctrl_c_does_not_wait_for_running_requests(kvrelay_up):
    run = kvrelay_up(model={"fake": {"step_s": 0.5}})
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


def test_sigterm_while_the_actors_start_leaves_nothing(kvrelay_up):
    run = kvrelay_up()
    run.wait_until(lambda: run.has("ray::PrefillAct"))
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait_end(END_S) == 0
    run.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_ray_starts_ends_at_once_and_leaves_nothing(kvrelay_up, number):
    run = kvrelay_up()
    run.wait_until(lambda: run.has("gcs_server"))
    os.kill(run.process.pid, number)
    assert run.wait_end(3.0) == 0
    run.assert_nothing_left()


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_when_a_process_of_ray_dies_while_it_starts_that_is_said_at_once(kvrelay_up, name):
    run = kvrelay_up()
    run.wait_until(lambda: run.has(name))
    time.sleep(1.0)  # until the launcher has seen it too; Ray takes longer to start
    next(process for process in run.family if process.name() == name).kill()
    assert run.wait_end(5.0) == 1
    assert f"kvrelay: Ray's {name} died" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.read_event()["event"] == "error"
    run.assert_nothing_left()


def test_a_port_in_use_is_named_within_seconds(kvrelay_up):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = kvrelay_up("--port", str(port))
        assert run.wait_end(15.0) == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in run.stderr


def test_a_model_that_is_not_there_is_named_within_seconds_and_nothing_is_left(kvrelay_up):
    run = kvrelay_up("--model", "/nowhere/model.gguf")
    assert run.wait_end(15.0) == 2
    assert "there is no model at /nowhere/model.gguf" in run.stderr
    assert "Traceback" not in run.stderr
    run.assert_nothing_left()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_when_ray_itself_dies_the_run_says_so_and_ends_and_nothing_is_left(kvrelay_up, name):
    run = kvrelay_up()
    run.wait_ready()
    next(process for process in run.family if process.name() == name).kill()
    assert run.wait_end(5.0) == 1
    assert f"kvrelay: Ray's {name} died" in run.stderr
    assert "Traceback" not in run.stderr
    run.assert_nothing_left()
    assert run.read_event()["event"] == "error"
    log = next((run.state / "logs").glob("*-cluster.jsonl"))
    assert f"Ray's {name} died" in json.loads(log.read_text().splitlines()[-1])["message"]
