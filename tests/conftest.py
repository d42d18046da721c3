"""What all tests share: the trace folder, one Ray, and that each of them leaves nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import tqdm
from leaks import POLL_S, SETTLE_S, Belongings, belongings, left_behind

from cluster.processes import list_descendants
from cluster.ray_runtime import RayRuntime

tqdm.tqdm.monitor_interval = 0  # transformers shows progress; its watching thread would never end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", type=Path, default=None, help="folder with public request traces; may be absent")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a Ray come last: while it lives in this process nobody can tell its sockets from ours."""
    items.sort(key=lambda item: "ray_local" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> Path | None:
    """The trace folder, where there is one."""
    folder: Path | None = request.config.getoption("--traces")
    return folder if folder is not None and folder.is_dir() else None


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
    assert not [child for child in children if child.is_running()]
    assert not folder.exists()
    assert {**os.environ, "PYTEST_CURRENT_TEST": ""} == {**before, "PYTEST_CURRENT_TEST": ""}


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: threads, open files, sockets and children as before, and in its event loop no task."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("nothing_is_left_in_the_loop")
        yield
        return
    before = _ours()
    yield
    ends_s = time.monotonic() + SETTLE_S
    while (leaks := left_behind(before, _ours())) and time.monotonic() < ends_s:
        time.sleep(POLL_S)  # what was told to end may take a moment
    assert not leaks, "left behind: " + "; ".join(leaks)


@pytest.fixture
async def nothing_is_left_in_the_loop() -> AsyncIterator[None]:
    """The same, looked at from inside the loop, which has files of its own."""
    before = _ours()
    yield
    ends_s = time.monotonic() + SETTLE_S
    while leaks := left_behind(before, _ours()):
        assert time.monotonic() < ends_s, "left behind: " + "; ".join(leaks)
        await asyncio.sleep(POLL_S)


def _ours() -> Belongings:
    """Without sockets while Ray lives in this process: it opens and closes some whenever it likes."""
    mine = belongings()
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return mine
    return mine._replace(files={key: name for key, name in mine.files.items() if "socket:" not in name})
