"""What is wrong with the machine is said before anything is started."""

from __future__ import annotations

import socket
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

import cluster.preflight
from cluster.machine import _available_bytes, count_visible
from cluster.preflight import (
    FIRST_PARTY,
    check_all,
    check_disk,
    check_model,
    check_packages,
    check_platform,
    check_port,
)
from pd_core.config import parse_config
from pd_core.errors import ConfigError, ModelError

ROOT = Path(cluster.preflight.__file__).resolve().parent.parent


def test_a_sound_machine_passes(tmp_path):
    check_all(parse_config({"router": {"port": 0}}), tmp_path)


def test_an_address_that_workers_could_not_tell_others_is_refused_whatever_its_name(tmp_path, monkeypatch):
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real(host.replace("all.test", "::"), *a, **k))
    with pytest.raises(ConfigError) as raised:
        check_all(parse_config({"router": {"port": 0}, "transfer": {"host": "all.test"}}), tmp_path)
    assert raised.value.param == "transfer.host"
    check_all(parse_config({"router": {"port": 0}, "transfer": {"host": "::1"}}), tmp_path)


def test_tls_files_are_read_before_anything_is_started(tmp_path):
    files = {field: str(tmp_path / field) for field in ("certificate", "key", "authority")}
    with pytest.raises(ConfigError, match="No such file") as raised:
        check_all(parse_config({"router": {"port": 0}, "tls": files}), tmp_path)
    assert raised.value.param == "tls.certificate"


def test_the_first_party_packages_are_those_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    assert sorted(FIRST_PARTY) == sorted(name for name in packages if "." not in name)


def test_a_namesake_from_elsewhere_is_named_with_its_place(tmp_path, monkeypatch):
    (tmp_path / "kvrelay_namesake").mkdir()
    (tmp_path / "kvrelay_namesake" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"package kvrelay_namesake is {tmp_path}/kvrelay_namesake instead of {ROOT}"):
        check_packages(["pd_core", "kvrelay_namesake"], ROOT)
    with pytest.raises(ConfigError, match="package kvrelay_nowhere is missing instead of"):
        check_packages(["kvrelay_nowhere"], ROOT)


def test_a_port_in_use_is_named_and_a_free_one_passes():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 cannot be used: .*--port") as raised:
            check_port("127.0.0.1", port)
        assert raised.value.param == "router.port"
    check_port("127.0.0.1", port)
    check_port("::1", 0)


def test_an_address_that_is_not_ours_is_named():
    with pytest.raises(ConfigError, match=r"router\.host 'no\.such\.host\.invalid'"):
        check_port("no.such.host.invalid", 0)
    with pytest.raises(
        ConfigError, match=r"router\.host '203\.0\.113\.1' is no address of this machine: Cannot assign"
    ):
        check_port("203.0.113.1", 0)


@pytest.mark.parametrize("section", ["router", "transfer"])
@pytest.mark.parametrize("host", ["", "203.0.113.1", "no.such.host.invalid", "a\0b", "x" * 70, "."])
def test_an_address_that_cannot_be_bound_is_named_by_its_setting(tmp_path, section, host):
    tree = {"router": {"port": 0}}
    tree[section] = tree.get(section, {}) | {"host": host}
    with pytest.raises(ConfigError, match=rf"^{section}\.host") as raised:
        check_all(parse_config(tree), tmp_path)
    assert raised.value.param == f"{section}.host"


@pytest.mark.parametrize(("version", "platform", "word"), [((3, 10), "linux", "3.10"), ((3, 11), "darwin", "darwin")])
def test_another_python_or_system_is_refused(version, platform, word):
    with pytest.raises(ConfigError, match=word):
        check_platform(version, platform)


def test_a_model_that_is_not_there_is_named(tmp_path):
    check_model("fake")
    check_model(None)
    good = tmp_path / "good.gguf"
    good.write_bytes(b"GGUF and more")
    check_model(str(good))
    with pytest.raises(ModelError, match=r"--model / model\.path: there is no model at /nowhere/model"):
        check_model("/nowhere/model")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", "the path is empty"),
        ("~nobody-of-this-name/x.gguf", "home directory"),
        ("a\0b.gguf", "there is no model"),
        ("{folder}", "lacks"),
        ("{folder}/text.gguf", "is not a GGUF file"),
        ("{folder}/text", "there is no model"),
    ],
)
def test_what_is_no_model_is_named_by_its_setting(tmp_path, path, sentence):
    for name in ("text", "text.gguf"):
        (tmp_path / name).write_text("hello")
    with pytest.raises(ModelError, match=sentence) as raised:
        check_model(path.format(folder=tmp_path))
    assert raised.value.message.startswith("--model / model.path: ")
    assert raised.value.param == "model.path"


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 5 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _place: usage)
    with pytest.raises(ConfigError, match=f"{tmp_path}: 5 MiB of disk are free"):
        check_disk(tmp_path)


@pytest.mark.parametrize(
    ("ids", "num_visible"),
    [(None, 4), ([], 0), (["-1"], 0), (["0"], 1), (["2", "3"], 2), (["1", "-1", "2"], 1), (["GPU-5ebe9f43"], 1)],
)
def test_gpus_that_are_hidden_do_not_count(ids, num_visible):
    assert count_visible(ids, num_present=4) == num_visible
    assert count_visible(ids, num_present=0) == 0


def test_too_few_gpus_are_named_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.preflight.count_gpus", lambda: 1)
    tree = {"router": {"port": 0}, "model": {"path": "fake", "device": "cuda"}}
    with pytest.raises(ConfigError, match="2 workers need a GPU each, and 1 can be seen"):
        check_all(parse_config(tree), tmp_path)
    check_all(parse_config(tree | {"prefill": {"num_workers": 0}}), tmp_path)


def test_memory_is_what_the_container_leaves_us(tmp_path):
    whole = _available_bytes(tmp_path)  # no limits there
    assert whole > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert _available_bytes(tmp_path) == pytest.approx(whole, rel=0.5)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert _available_bytes(tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert _available_bytes(tmp_path) == 150_000
    (tmp_path / "memory.current").write_text("2000000\n")
    assert _available_bytes(tmp_path) == 0
