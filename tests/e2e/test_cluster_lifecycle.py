"""Start, death, silence and end of a cluster of real processes, in one Ray, with stand-in actors."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import standin_actors
from standin_actors import (
    BrokenDecode,
    DeafPrefill,
    DyingDecode,
    MuteDecode,
    StandinDecode,
    StandinPrefill,
    StandinRouter,
)
from waiting import until

from cluster.actors import ActorClasses, real_actors
from cluster.bench_cluster import computing_cores
from cluster.launch import Cluster
from cluster.policy import SeatLimits, SeatState
from pd_core.config import Config, parse_config
from pd_core.errors import ModelError, Unavailable

ray.cloudpickle.register_pickle_by_value(standin_actors)  # Ray's workers cannot import from tests/
pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(60)]

ACTORS = ActorClasses(prefill=StandinPrefill, decode=StandinDecode, router=StandinRouter)
LIMITS = SeatLimits(suspect_s=1.0, dead_s=3.0, first_delay_s=0.1, max_gap_s=0.5)
"""Short for a test, and long enough that nobody is silent for want of a processor."""


def fake_config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "fake"},
        "router": {"port": 0},
        "heartbeat": {"interval_s": 0.1, "suspect_s": 1.0, "dead_s": 3.0},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return parse_config(tree)


def make_cluster(tmp_path: Path, actors: ActorClasses, limits: SeatLimits = LIMITS) -> Cluster:
    return Cluster(actors=actors, cache_dir=tmp_path, log_files=None, limits=limits, on_progress=lambda _: None)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    running = make_cluster(tmp_path, ACTORS)
    await running.start(fake_config())
    yield running
    pids = running.pids
    await running.stop(grace_s=2.0)
    assert sorted(pids) == ["decode-0", "prefill-0", "router"]
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def told_of(cluster: Cluster) -> dict[str, str]:
    """What the router was told: incarnations of the workers, by name."""
    assert cluster._router is not None
    ready = await cluster._router.ask_ready(5.0)
    told: dict[str, str] = ready["told"]
    return told


async def until_told(cluster: Cluster, condition: Callable[[dict[str, str]], bool], deadline_s: float) -> None:
    began_s = time.monotonic()
    while not condition(await told_of(cluster)):
        assert time.monotonic() - began_s < deadline_s, "the router was not told"
        await asyncio.sleep(0.02)


def by_name(cluster: Cluster) -> dict[str, str]:
    return {endpoint.name: endpoint.incarnation for endpoint in cluster.endpoints}


async def test_a_started_cluster_runs_in_three_processes_and_the_router_knows_both_workers(cluster):
    assert set(cluster.states.values()) == {SeatState.RUNNING}
    assert len(set(cluster.pids.values())) == 3
    assert await told_of(cluster) == by_name(cluster)
    assert {endpoint.pid for endpoint in cluster.endpoints} | {cluster.pids["router"]} == set(cluster.pids.values())


async def test_workers_compute_on_cores_of_their_own_and_all_else_runs_anywhere(cluster):
    ours = os.sched_getaffinity(0)
    prefill, decode = (set(computing_cores(cluster.pids[name])) for name in ("prefill-0", "decode-0"))
    assert prefill | decode == ours
    assert len(ours) == 1 or not prefill & decode
    for name in ("router", "prefill-0", "decode-0"):
        assert os.sched_getaffinity(cluster.pids[name]) == ours


async def test_a_killed_worker_is_started_again_under_a_new_incarnation_and_the_router_is_told_both(cluster):
    before, pid = by_name(cluster), cluster.pids["decode-0"]
    os.kill(pid, signal.SIGKILL)
    assert await until(lambda: "decode-0" not in by_name(cluster), 2.0) < 1.0
    await until_told(cluster, lambda told: "decode-0" not in told or told["decode-0"] != before["decode-0"], 2.0)
    await until(lambda: "decode-0" in by_name(cluster), 20.0)
    after = by_name(cluster)
    assert after["decode-0"] != before["decode-0"]
    assert after["prefill-0"] == before["prefill-0"]
    assert cluster.pids["decode-0"] != pid
    await until_told(cluster, lambda told: told == after, 5.0)


async def test_a_worker_that_falls_silent_is_killed_within_dead_s_and_started_again(cluster):
    before, pid = by_name(cluster), cluster.pids["prefill-0"]
    os.kill(pid, signal.SIGSTOP)
    took_s = await until(lambda: not psutil.pid_exists(pid), LIMITS.dead_s + 2.0)
    assert took_s > LIMITS.suspect_s
    await until(lambda: "prefill-0" in by_name(cluster), 20.0)
    assert by_name(cluster)["prefill-0"] != before["prefill-0"]
    await until_told(cluster, lambda told: told == by_name(cluster), 5.0)


async def test_a_worker_that_is_silent_for_a_moment_is_suspected_and_not_killed(cluster):
    before, pid = by_name(cluster), cluster.pids["decode-0"]
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: cluster.states["decode-0"] is SeatState.SUSPECT, 3.0)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: cluster.states["decode-0"] is SeatState.RUNNING, 3.0)
    assert by_name(cluster) == before


async def test_a_killed_router_comes_back_on_its_port_and_is_told_the_workers(cluster):
    address, pid = cluster._router.address, cluster.pids["router"]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: cluster.states["router"] is not SeatState.RUNNING, 2.0)
    await until(lambda: cluster.states["router"] is SeatState.RUNNING, 20.0)
    assert cluster._router.address == address
    assert cluster.pids["router"] != pid
    await until_told(cluster, lambda told: told == by_name(cluster), 5.0)


async def test_a_start_that_fails_says_why_and_leaves_no_process(tmp_path):
    broken = make_cluster(tmp_path, ActorClasses(prefill=StandinPrefill, decode=BrokenDecode, router=StandinRouter))
    with pytest.raises(ModelError, match="the weights are torn"):
        await broken.start(fake_config())
    assert not [pid for pid in broken.pids.values() if psutil.pid_exists(pid)]


async def test_a_worker_that_dies_while_it_starts_ends_the_start(tmp_path):
    dying = make_cluster(tmp_path, ActorClasses(prefill=StandinPrefill, decode=DyingDecode, router=StandinRouter))
    with pytest.raises(Unavailable, match="died"):
        await dying.start(fake_config())
    assert not [pid for pid in dying.pids.values() if psutil.pid_exists(pid)]


async def test_a_worker_that_never_gets_ready_is_given_up_at_the_start_deadline(tmp_path):
    actors = ActorClasses(prefill=StandinPrefill, decode=MuteDecode, router=StandinRouter)
    mute = make_cluster(tmp_path, actors, SeatLimits(start_deadline_s=6.0))
    with pytest.raises(Unavailable, match=r"decode-0: not started within 6 s"):
        await mute.start(fake_config())
    assert not [pid for pid in mute.pids.values() if psutil.pid_exists(pid)]


async def test_a_worker_that_does_not_drain_is_ended_within_the_grace_time(tmp_path):
    deaf = make_cluster(tmp_path, ActorClasses(prefill=DeafPrefill, decode=StandinDecode, router=StandinRouter))
    await deaf.start(fake_config())
    pids = deaf.pids
    began_s = time.monotonic()
    await deaf.stop(grace_s=1.0)
    assert time.monotonic() - began_s < 3.0
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]


async def test_two_clusters_live_in_one_ray_without_knowing_of_each_other(cluster, tmp_path):
    other = make_cluster(tmp_path, ACTORS)
    await other.start(fake_config())
    assert not set(other.pids.values()) & set(cluster.pids.values())
    assert not set(by_name(other).values()) & set(by_name(cluster).values())
    await other.stop(grace_s=1.0)
    assert set(cluster.states.values()) == {SeatState.RUNNING}
    assert await told_of(cluster) == by_name(cluster)


async def test_the_real_actors_serve_again_after_a_worker_was_killed(tmp_path):
    real = make_cluster(tmp_path, real_actors())
    url = (await real.start(fake_config())).url
    body = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as http:
        first = await http.post("/v1/chat/completions", json=body)
        assert first.status_code == 200
        for name in ("decode-0", "prefill-0"):
            before = by_name(real)[name]
            os.kill(real.pids[name], signal.SIGKILL)
            await until(lambda name=name, before=before: by_name(real).get(name, before) != before, 20.0)
        deadline_s = time.monotonic() + 10.0
        while (again := await http.post("/v1/chat/completions", json=body)).status_code == 503:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)
        assert again.json()["choices"] == first.json()["choices"]
    await real.stop(grace_s=2.0)
    assert not [pid for pid in real.pids.values() if psutil.pid_exists(pid)]
