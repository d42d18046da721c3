"""What all tests share: which of them are quick, the trace folder, one Ray, and that each leaves nothing behind.

make test           everything but what follows
make cluster-test   marker `cluster`: tests/e2e, tests/hosts and tests/identity, save their modules `test_quick_*`
make identity       marker `slow` in tests/identity; make chaos: in tests/contract
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tqdm
from hypothesis import settings
from kvrelay_process import KvrelayProcess
from leaks import POLL_S, SETTLE_S, Belongings, belongings, left_behind

from cluster.processes import list_descendants
from cluster.ray_runtime import RayRuntime

CLUSTER_FOLDERS = [Path(__file__).parent / name for name in ("e2e", "hosts", "identity")]
QUICK = "test_quick_"
RAY_ACTORS = 5
"""A router and two workers of each role."""
RAY_GPUS = 2
"""Ray believes it: it hands out their numbers whether there are any or not, and no test with it runs on one."""
settings.register_profile("kvrelay", deadline=None, print_blob=True)  # a busy machine is no fault of the code
settings.load_profile("kvrelay")
tqdm.tqdm.monitor_interval = 0  # transformers shows progress; its watching thread would never end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", type=Path, default=None, help="folder with public request traces; may be absent")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is not for `make test`, by its folder.

    Tests with a Ray come last: while it lives in this process nobody can tell its sockets from ours.
    """
    for item in items:
        is_below = any(folder in item.path.parents for folder in CLUSTER_FOLDERS)
        if is_below and not item.path.name.startswith(QUICK):
            item.add_marker("cluster")
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
    runtime.start(RAY_ACTORS, RAY_GPUS)
    folder = runtime.folder
    assert folder is not None
    yield runtime
    children = list_descendants()
    assert children
    assert runtime.stop() == []
    assert not [child for child in children if child.is_running()]
    assert not folder.exists()
    assert {**os.environ, "PYTEST_CURRENT_TEST": ""} == {**before, "PYTEST_CURRENT_TEST": ""}


@pytest.fixture
def kvrelay_up(tmp_path: Path) -> Iterator[Any]:
    """Starts `kvrelay up` with these flags and config sections, as often as it is called. See KvrelayProcess."""
    runs: list[KvrelayProcess] = []

    def start(*flags: str, cache: Path | None = None, around: list[str] | None = None, **config: Any) -> KvrelayProcess:
        home = tmp_path / f"home-{len(runs)}"
        home.mkdir()
        runs.append(KvrelayProcess(home, *flags, config=config, cache=cache, around=around or []))
        return runs[-1]

    yield start
    for run in runs:
        run.end_for_certain()


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
        gc.collect()  # as tests/leaks.py does: what only a cycle keeps is no leak
        await asyncio.sleep(POLL_S)


def _ours() -> Belongings:
    """Without sockets while Ray lives in this process: it opens and closes some whenever it likes."""
    mine = belongings()
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return mine
    return mine._replace(files={key: name for key, name in mine.files.items() if "socket:" not in name})
