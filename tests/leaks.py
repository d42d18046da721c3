"""Nothing may be left behind by a test: no task, thread, open file, socket or child process.

    async with no_leaks():
        ...

Works inside one event loop; the default executor's threads belong to the loop and are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

SETTLE_S = 5.0
"""How long things that have been told to end may take for it, also where two cores do the work of many."""
POLL_S = 0.01
_EXECUTOR_THREADS = "asyncio_"


class Belongings(NamedTuple):
    """What this process has at one moment."""

    tasks: dict[object, str]
    threads: dict[object, str]
    files: dict[object, str]
    children: dict[object, str]


def belongings() -> Belongings:
    """What there is now, each thing with a name for people. The calling task is not counted."""
    return Belongings(_tasks(), _threads(), _files(), _children())


def left_behind(before: Belongings, after: Belongings) -> list[str]:
    """Names of what is there now and was not before."""
    kinds = zip(Belongings._fields, before, after, strict=True)
    return [
        f"{kind.removesuffix('s')}: {name}"
        for kind, had, has in kinds
        for thing, name in has.items()
        if thing not in had
    ]


@contextlib.asynccontextmanager
async def no_leaks(settle_s: float = SETTLE_S) -> AsyncIterator[None]:
    """Fails with AssertionError when the block leaves anything behind for longer than `settle_s`.

    An error of the block itself is raised as it is: what it left behind is then not the point.
    """
    before = belongings()
    yield
    leaks = await _wait_gone(lambda: left_behind(before, belongings()), settle_s)
    assert not leaks, "left behind: " + "; ".join(leaks)


async def _wait_gone(look: Callable[[], list[str]], settle_s: float) -> list[str]:
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + settle_s
    if look():
        gc.collect()
    while (leaks := look()) and loop.time() < ends_s:
        await asyncio.sleep(POLL_S)
    if leaks:
        gc.collect()
    return look() if leaks else []


def _tasks() -> dict[object, str]:
    try:
        current = asyncio.current_task()
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs
        return {}
    return {task: repr(task) for task in tasks if task is not current}


def _threads() -> dict[object, str]:
    return {
        thread.ident: thread.name for thread in threading.enumerate() if not thread.name.startswith(_EXECUTOR_THREADS)
    }


def _files() -> dict[object, str]:
    found: dict[object, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            target = str(entry.readlink())
            if not target.startswith("/proc/"):
                found[(entry.name, target)] = f"{entry.name} -> {target}"
    return found


def _children() -> dict[object, str]:
    pids: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            pids.update((task / "children").read_text().split())
    return {pid: f"process {pid}" for pid in pids}
