"""Known fault 34: fixed ports or one device for all that live on a host; what is short is found out late."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest
import ray
import standin_actors
from fake_cluster import expected_ids, fake_cluster, slow_config
from kvrelay_process import END_S, SHARED_MEMORY, KvrelayProcess
from kvrelay_process import ask as ask_chat
from standin_actors import StandinDecode, StandinPrefill, StandinRouter, visible_gpus

from cluster.actors import ActorClasses
from cluster.asking import ask
from cluster.launch import Cluster
from pd_core.config import Config, parse_config
from pd_core.errors import Unavailable

ray.cloudpickle.register_pickle_by_value(standin_actors)  # Ray's workers cannot import from tests/
pytestmark = pytest.mark.timeout(180)

STANDINS = ActorClasses(prefill=StandinPrefill, decode=StandinDecode, router=StandinRouter)
NAMED_S = 15.0
"""What is wrong is named within so long."""
SHORTAGE_S = 30.0
SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
"""Words before a command that then has a /dev/shm of 64 MiB, as containers do."""


def test_two_clusters_of_two_prefill_and_two_decode_workers_live_on_one_host(kvrelay_up):
    flags = ("--prefill", "2", "--decode", "2")
    first = kvrelay_up(*flags)
    url = first.wait_ready()["url"]
    port = url.rpartition(":")[2]

    began_s = time.monotonic()
    refused = kvrelay_up(*flags, "--port", port)
    assert refused.wait_end(NAMED_S) == 2
    assert time.monotonic() - began_s < NAMED_S
    assert f"port {port} on 127.0.0.1 cannot be used" in refused.stderr

    second = kvrelay_up(*flags)
    ready = second.wait_ready()
    names = ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert sorted(worker["name"] for worker in ready["workers"]) == names
    assert not _listening(first) & _listening(second)
    for number in range(4):
        for at in (url, ready["url"]):
            answer = ask_chat(
                at, messages=[{"role": "user", "content": f"{at} {number}"}], max_tokens=5, return_token_ids=True
            )
            assert answer.json()["choices"][0]["token_ids"] == expected_ids(f"{at} {number}", 5)
    for run in (first, second):
        run.press_ctrl_c()
        assert run.wait_end(END_S) == 0
    for run in (first, second, refused):
        run.assert_nothing_left()


def _ids(url: str, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    ids: list[int] = ask_chat(url, messages=messages, max_tokens=5, return_token_ids=True).json()["choices"][0][
        "token_ids"
    ]
    return ids


def _listening(run: KvrelayProcess) -> set[int]:
    run.look()
    return {
        connection.laddr.port
        for process in run.family
        if process.is_running()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_small_dev_shm_is_enough_because_nothing_lies_there(kvrelay_up, path):
    """Neither Ray's object store of 100 MiB nor the pools, which are larger than all of it."""
    if subprocess.run([*SMALL_SHM, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a small /dev/shm")
    pools = {"prefill": {"num_blocks": 400_000}, "decode": {"num_blocks": 400_000}}  # 98 MiB each
    run = kvrelay_up("--transfer", path, around=SMALL_SHM, **pools)
    url = run.wait_ready()["url"]
    assert _ids(url, "hi") == expected_ids("hi", 5)
    assert [process.pid for process in run.family if _maps_shared_memory(process)] == []
    run.end_by_ctrl_c()


def _maps_shared_memory(process: psutil.Process) -> bool:
    maps = Path(f"/proc/{process.pid}/maps")
    return maps.exists() and f" {SHARED_MEMORY}/" in maps.read_text()


@pytest.mark.usefixtures("ray_local")
async def test_more_actors_than_ray_has_cpus_start_and_serve_all_the_same(tmp_path):
    """Ray has as many as a router and two workers of each role need; here there is one worker more."""
    config = slow_config(prefill={"num_workers": 3}, decode={"num_workers": 2})
    assert ray.cluster_resources()["CPU"] < 1 + 3 + 2
    async with fake_cluster(config, tmp_path) as fake:
        assert len(fake.cluster.endpoints) == 5
        outcome = await fake.ask("hello", 5)
        assert outcome.body["choices"][0]["token_ids"] == expected_ids("hello", 5)


def _cuda_cluster(tmp_path: Path) -> Cluster:
    return Cluster(actors=STANDINS, cache_dir=tmp_path, log_files=None, limits=None, on_progress=lambda _: None)


def _cuda_config(num_decode: int) -> Config:
    decode = {"num_workers": num_decode}
    return parse_config({"model": {"path": "fake", "device": "cuda"}, "router": {"port": 0}, "decode": decode})


@pytest.mark.usefixtures("ray_local")
async def test_every_worker_on_cuda_sees_one_gpu_that_no_other_sees(tmp_path):
    cluster = _cuda_cluster(tmp_path)
    await cluster.start(_cuda_config(1))
    asking = {seat.name: seat._actor.__ray_call__.remote(visible_gpus) for seat in cluster._workers}
    devices = {name: await ask(reply, 10.0, name) for name, reply in asking.items()}
    await cluster.stop(grace_s=1.0)
    assert sorted(devices) == ["decode-0", "prefill-0"]
    assert sorted(devices.values()) == ["0", "1"]


@pytest.mark.usefixtures("ray_local")
async def test_a_gpu_short_is_reported_with_the_numbers_and_nothing_is_started(tmp_path):
    cluster = _cuda_cluster(tmp_path)
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match=r"Ray has 2 GPUs, 2 of them free; model\.device cuda needs 3") as raised:
        await cluster.start(_cuda_config(2))
    assert time.monotonic() - began_s < SHORTAGE_S
    assert raised.value.param == "model.device"
    assert cluster.pids == {}


def test_hidden_gpus_are_named_within_seconds(kvrelay_up, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = kvrelay_up("--device", "cuda")
    assert run.wait_end(NAMED_S) == 2
    assert "2 workers need a GPU each, and 0 can be seen here" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.read_event()["param"] == "model.device"
    run.assert_nothing_left()
