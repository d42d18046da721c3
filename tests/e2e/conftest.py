"""One Ray for all tests with real processes; it is gone without a trace when they are over."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import ray
from leaks import SETTLE_S, Belongings, belongings, left_behind

from cluster.processes import list_descendants
from cluster.ray_runtime import RayRuntime

POLL_S = 0.02


@pytest.fixture(scope="session")
def ray_local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRuntime]:
    """A private Ray on this machine, as `kvrelay up` starts it. Clusters come and go in it."""
    before = dict(os.environ)
    runtime = RayRuntime(tmp_path_factory.mktemp("state"))
    runtime.start(num_actors=3)
    folder = runtime.folder
    assert folder is not None
    yield runtime
    children = list_descendants()
    assert children
    assert runtime.stop() == []
    assert not ray.is_initialized()
    assert not [child for child in children if child.is_running()]
    assert not folder.exists()
    assert {**os.environ, "PYTEST_CURRENT_TEST": ""} == {**before, "PYTEST_CURRENT_TEST": ""}


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """As everywhere, but for sockets: Ray lives in this process, and opens and closes some whenever it likes."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_is_left")
        yield
        return
    before = _without_sockets()
    yield
    ends_s = time.monotonic() + SETTLE_S
    while (leaks := left_behind(before, _without_sockets())) and time.monotonic() < ends_s:
        time.sleep(POLL_S)
    assert not leaks, "left behind: " + "; ".join(leaks)


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    before = _without_sockets()
    yield
    ends_s = time.monotonic() + SETTLE_S
    while leaks := left_behind(before, _without_sockets()):
        assert time.monotonic() < ends_s, "left behind: " + "; ".join(leaks)
        await asyncio.sleep(POLL_S)


def _without_sockets() -> Belongings:
    mine = belongings()
    return mine._replace(files={key: name for key, name in mine.files.items() if "socket:" not in name})
