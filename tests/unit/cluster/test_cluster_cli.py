"""The command line as far as nothing is started, and what it writes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from click.testing import CliRunner

from cluster.commands import kvrelay, make_state_dir, ready_json, ready_text
from cluster.launch import ClusterAddress
from cluster.log_files import MAX_FILES, LogFiles, LoggedStream, log_to_file
from cluster.progress import Progress
from cluster.ray_runtime import (
    MAX_SOCKET_PATH,
    SOCKET_BELOW,
    RayRuntime,
    make_private_folder,
    own,
    sweep_abandoned,
    write_private,
)
from cluster.stop_signals import StopSignals
from pd_core.config import Config, TransferConfig
from pd_core.errors import ConfigError
from pd_core.messages import WorkerEndpoint

ADDRESS = ClusterAddress(
    url="http://127.0.0.1:18080",
    host="127.0.0.1",
    port=18080,
    model_name="it's a model",
    endpoints=[WorkerEndpoint("decode-0", "decode", "127.0.0.1", 5, "abc", 77)],
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_version_is_the_package_s():
    result = CliRunner().invoke(kvrelay, ["--version"])
    assert (result.exit_code, result.output) == (0, "kvrelay, version 0.1.0\n")


def test_a_port_in_use_ends_with_status_2_and_a_sentence_naming_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(kvrelay, ["up", "--port", str(port)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"port {port} on 127.0.0.1 cannot be used" in result.stderr


def test_with_json_an_error_is_one_object_that_names_the_path(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("decode: {max_batch: 0}")
    result = CliRunner().invoke(kvrelay, ["up", "--json", "--config", str(file)])
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "event": "error",
        "code": "config_error",
        "message": f"{file}: decode.max_batch is 0; it must be between 1 and 1024",
        "param": "decode.max_batch",
    }


FLAGS = {
    "prefill": 0,
    "decode": 2,
    "transfer": "shm",
    "device": "cuda",
    "dtype": "float32",
    "host": "::1",
    "port": 0,
}


def test_flags_override_the_file(tmp_path, monkeypatch):
    seen: list[Config] = []

    def check(config: Config, _state_dir: Path) -> None:
        seen.append(config)
        raise ConfigError("no more is needed")

    monkeypatch.setattr("cluster.preflight.check_all", check)
    file = tmp_path / "c.yaml"
    file.write_text("{decode: {num_workers: 5, max_batch: 3}, transfer: {path: tcp}, prefill: {num_workers: 7}}")
    flags = [f"--{name}={value}" for name, value in FLAGS.items()]
    assert CliRunner().invoke(kvrelay, ["up", "--config", str(file), *flags]).exit_code == 2
    assert CliRunner().invoke(kvrelay, ["up", "--config", str(file)]).exit_code == 2
    by_flags, by_file = seen
    assert (by_flags.prefill.num_workers, by_flags.decode.num_workers, by_flags.transfer.path) == (0, 2, "shm")
    assert (by_flags.model.device, by_flags.model.dtype) == ("cuda", "float32")
    assert (by_flags.router.host, by_flags.router.port, by_flags.decode.max_batch) == ("::1", 0, 3)
    assert (by_file.prefill.num_workers, by_file.decode.num_workers, by_file.transfer.path) == (7, 5, "tcp")


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "x"],
        ["--dtype", "int3"],
        ["--nonsense"],
        ["--prefill", "-1"],
        ["--decode", "0"],
        ["--transfer", "pigeon"],
        ["--device", "tpu"],
    ],
)
def test_a_wrong_flag_ends_with_status_2(flags):
    assert CliRunner().invoke(kvrelay, ["up", *flags]).exit_code == 2


def test_every_path_that_the_config_knows_can_be_asked_for_by_a_flag():
    [flag] = [option for option in kvrelay.commands["up"].params if option.name == "transfer"]
    assert set(flag.type.choices) == set(get_args(get_type_hints(TransferConfig)["path"]))


def test_the_ready_text_is_one_line_and_a_command_to_paste():
    first, command, rest = ready_text(ADDRESS).split("\n")
    assert ADDRESS.url in first
    assert rest == ""
    words = shlex.split(command)
    assert words[:3] == ["curl", "-sSN", "http://127.0.0.1:18080/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("it's a model", True)


def test_the_ready_object_is_one_line():
    line = ready_json(ADDRESS)
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "event": "ready",
        "url": ADDRESS.url,
        "model": ADDRESS.model_name,
        "workers": [{"name": "decode-0", "role": "decode", "pid": 77}],
    }


def test_the_state_folder_is_closed_to_others_even_if_it_was_open():
    folder = make_state_dir()
    assert mode_of(folder) == 0o700
    folder.chmod(0o755)
    assert mode_of(make_state_dir()) == 0o700


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "state").write_text("in the way")
    result = CliRunner().invoke(kvrelay, ["up"])
    assert result.exit_code == 2
    assert "the state folder" in result.stderr


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(ConfigError, match=f"the log folder {tmp_path}/logs cannot be used: File exists"):
        LogFiles(tmp_path, 1)


def test_a_folder_for_ray_that_cannot_be_made_is_named():
    with tempfile.TemporaryDirectory(prefix="kv") as short:  # else it is made in /tmp
        (Path(short) / "run").write_text("in the way")
        with pytest.raises(ConfigError, match=f"no folder for Ray can be made in {short}: File exists"):
            RayRuntime(Path(short)).start(1, 0)


def test_a_log_file_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"the log file .* cannot be made: Is a directory"):
        log_to_file(tmp_path)


def test_a_path_that_is_no_model_ends_with_status_2_and_its_setting():
    result = CliRunner().invoke(kvrelay, ["up", "--json", "--port", "0", "--model", ""])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["param"] == "model.path"
    assert "--model / model.path: the path is empty" in result.stderr


START_AND_SAY = """
import sys
sys.modules["cluster.commands"] = type(sys)("slow")  # stands in for imports that take long
def kvrelay():
    print("begun", flush=True)
    import time
    time.sleep(60)
sys.modules["cluster.commands"].kvrelay = kvrelay
from cluster.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_anything_is_started_ends_without_a_word(number):
    with subprocess.Popen(
        [sys.executable, "-c", START_AND_SAY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(5.0) == 130
        assert process.stderr.read() == ""


def test_what_the_process_begins_with_imports_next_to_nothing():
    code = "import sys; before = set(sys.modules); import cluster.cli; print(*(set(sys.modules) - before))"
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in ours if name.partition(".")[0] in ("click", "yaml", "asyncio", "pd_core", "ray")} == set()


async def test_whoever_had_the_signals_before_gets_them_back():
    def before(_number: int, _frame: object) -> None:
        raise AssertionError("not called")

    old = signal.signal(signal.SIGTERM, before)
    try:
        stops = StopSignals(lambda: None)
        stops.install()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stops.first.wait(), 5.0)
        stops.uninstall()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, old)


def test_log_lines_are_json_and_only_the_newest_files_are_kept(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(MAX_FILES + 5):
        (folder / f"20200101-0000{number:02}-1-cluster.jsonl").touch()
    files = LogFiles(tmp_path, pid=42)
    assert len(list(folder.iterdir())) == MAX_FILES
    file = files.path("cluster")
    handler = log_to_file(file)
    try:
        logging.getLogger("cluster.test").info("hello", extra={"seat": "decode-0"})
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    line = json.loads(file.read_text())
    assert (line["message"], line["seat"], line["level"]) == ("hello", "decode-0", "info")
    assert mode_of(file) == 0o600


def test_what_others_print_becomes_log_lines(caplog):
    caplog.set_level(logging.INFO)
    stream = LoggedStream(logging.getLogger("ray"))
    print("a worker died\nand", end="", file=stream)
    print(" another", file=stream)
    assert [record.getMessage() for record in caplog.records] == ["a worker died", "and another"]


def test_progress_is_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(stream, num_steps=3)
    for percent in range(0, 100, 10):
        progress(f"converting the model: {percent}%")
    progress("router is up")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("converting the model: 0%")
    assert lines[1].endswith("router is up")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_leaves_nothing_there():
    stream = Terminal()
    progress = Progress(stream, num_steps=2)
    progress("starting Ray")
    progress("router is up")
    progress.close()
    assert "router is up" in stream.getvalue()
    assert stream.getvalue().split("\r")[-1].strip() == ""


def test_ray_s_folder_is_private_and_short_enough_for_its_sockets(tmp_path):
    with tempfile.TemporaryDirectory(prefix="kv") as short:
        below = make_private_folder(Path(short))
        assert below.parent == Path(short) / "run"
        assert (mode_of(below), mode_of(below.parent)) == (0o700, 0o700)
    deep = tmp_path / ("d" * 60)
    elsewhere = make_private_folder(deep)
    try:
        assert mode_of(elsewhere) == 0o700
        assert len(str(elsewhere) + SOCKET_BELOW) <= MAX_SOCKET_PATH
        assert not deep.exists()
    finally:
        elsewhere.rmdir()


def test_folders_of_killed_launchers_are_swept_and_those_in_use_are_not(tmp_path):
    folders = [tmp_path / f"kvrelay-{name}" for name in ("alive", "killed", "unowned")]
    for folder in folders:
        (folder / "r" / "sockets").mkdir(parents=True)
    alive, killed = own(folders[0]), own(folders[1])
    os.close(killed)
    owners = [folder / "owner" for folder in folders]
    sweep_abandoned(owners)
    assert [folder.exists() for folder in folders] == [True, False, True]
    os.close(alive)
    sweep_abandoned(owners)
    assert [folder.exists() for folder in folders] == [False, False, True]


def test_a_folder_that_fills_while_it_is_emptied_is_emptied_again(tmp_path, monkeypatch):
    runtime = RayRuntime(tmp_path)
    runtime.folder = tmp_path / "folder"
    runtime.folder.mkdir()
    really, calls = shutil.rmtree, []

    def emptied_too_early(folder: Path, **options: bool) -> None:
        calls.append(folder)
        if len(calls) > 1:
            really(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", emptied_too_early)
    runtime.remove_files()
    assert not (tmp_path / "folder").exists()


def test_a_private_file_is_private_from_the_start_and_never_replaces_another(tmp_path):
    file = tmp_path / "token"
    write_private(file, "secret")
    assert (file.read_text(), mode_of(file)) == ("secret", 0o600)
    with pytest.raises(FileExistsError):
        write_private(file, "other")
