"""What all tests share: the trace folder, and that each of them leaves nothing behind."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from leaks import SETTLE_S, belongings, left_behind, no_leaks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", type=Path, default=None, help="folder with public request traces; may be absent")


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> Path | None:
    """The trace folder, where there is one."""
    folder: Path | None = request.config.getoption("--traces")
    return folder if folder is not None and folder.is_dir() else None


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: threads, open files, sockets and children as before, and in its event loop no task."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_is_left")  # looks from inside the loop, which has files of its own
        yield
        return
    before = belongings()
    yield
    ends_s = time.monotonic() + SETTLE_S
    while (leaks := left_behind(before, belongings())) and time.monotonic() < ends_s:
        time.sleep(0.01)  # what was told to end may take a moment
    assert not leaks, "left behind: " + "; ".join(leaks)


@pytest.fixture
async def no_task_is_left() -> AsyncIterator[None]:
    async with no_leaks():
        yield
