"""A run of `kvrelay up`, with a cluster that is none."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from cluster.actors import ActorClasses
from cluster.launch import ClusterAddress
from cluster.log_files import LogFiles
from cluster.progress import Progress
from cluster.stop_signals import StopSignals
from cluster.up import Up
from pd_core.config import Config
from pd_core.errors import KvrelayError

ADDRESS = ClusterAddress(url="http://127.0.0.1:1", host="127.0.0.1", port=1, model_name="fake", endpoints=[])


class FakeCluster:
    """Runs until `faults` has an error."""

    story: list[str]
    faults: asyncio.Queue[KvrelayError]

    def __init__(self, **_: object) -> None: ...

    async def start(self, _: Config) -> ClusterAddress:
        self.story.append("start")
        return ADDRESS

    async def run_until_failed(self) -> None:
        raise await self.faults.get()

    async def stop(self, grace_s: float) -> None:
        self.story.append(f"stop within {grace_s:g} s")

    async def kill(self) -> None:
        self.story.append("kill")


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    FakeCluster.story, FakeCluster.faults = [], asyncio.Queue()

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr("cluster.up.Cluster", FakeCluster)
    monkeypatch.setattr(Up, "_prepare", nothing)
    return FakeCluster.story


def begin(folder: Path, stops: StopSignals, shown: list[ClusterAddress]) -> asyncio.Task[None]:
    actors = ActorClasses(router=object, prefill=object, decode=object)
    up = Up(
        Config(),
        actors=actors,
        state_dir=folder,
        cache_dir=folder,
        grace_s=3.0,
        on_lost=lambda error: pytest.fail(error.message),
    )
    progress = Progress(io.StringIO(), up.num_steps)
    return asyncio.create_task(up._run(stops, LogFiles(folder, 1), progress, shown.append))


async def test_when_the_supervision_fails_the_cluster_is_stopped_and_the_run_ends_with_that_error(tmp_path, story):
    shown: list[ClusterAddress] = []
    run = begin(tmp_path, StopSignals(lambda: None), shown)
    FakeCluster.faults.put_nowait(KvrelayError("supervision failed: a fault"))
    with pytest.raises(KvrelayError, match="supervision failed: a fault"):
        await asyncio.wait_for(run, 2)
    assert shown == [ADDRESS]
    assert story == ["start", "stop within 3 s"]


async def test_without_a_failure_a_signal_ends_the_run_well(tmp_path, story):
    stops = StopSignals(lambda: None)
    run = begin(tmp_path, stops, [])
    stops.first.set()
    await asyncio.wait_for(run, 2)
    assert story[-1] != "kill"
