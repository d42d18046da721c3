"""Watches the processes that Ray itself consists of: without any one of them nothing of a cluster can go on.

RayStartWatch  while Ray starts: its library would try for half a minute to reach one that has died
RayWatch       afterwards: the library would say nothing for a minute and then abort this process; so this is a thread
               of its own, which neither Ray nor a blocked event loop can hold up
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

import psutil

from pd_core.errors import Unavailable

VITAL = ("gcs_server", "raylet")


class RayStartWatch:
    """Looks, as often as it is asked, at which of `names` have come and gone. They are children of this process."""

    def __init__(self, names: tuple[str, ...] = VITAL) -> None:
        self._names = names
        self._known: dict[int, str] = {}

    def find_dead(self) -> str | None:
        """The name of one that was there at an earlier call and has ended; None while there is none."""
        alive = {child.pid: name for child in psutil.Process().children() if (name := _name_if_alive(child))}
        for pid, name in self._known.items():
            if pid not in alive:
                return name
        self._known |= {pid: name for pid, name in alive.items() if name in self._names}
        return None


class RayWatch:
    """Calls `on_lost`, in its thread, with the name of the first of `names` that ends, unless it is closed before.

    names: of children of this process
    Raises Unavailable when one of them is not running in the first place.
    """

    def __init__(self, on_lost: Callable[[str], None], names: tuple[str, ...] = VITAL) -> None:
        self._on_lost = on_lost
        self._names: dict[int, str] = {}
        for name in names:
            self._names[_open_child(name)] = name
        self._closing = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="ray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before Ray is ended on purpose."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        for descriptor in [*self._names, self._closing]:
            os.close(descriptor)

    def _watch(self) -> None:
        poller = select.poll()
        for descriptor in [*self._names, self._closing]:
            poller.register(descriptor, select.POLLIN)
        ended = [descriptor for descriptor, _ in poller.poll()]
        if self._closing not in ended:
            self._on_lost(self._names[ended[0]])


def _name_if_alive(process: psutil.Process) -> str | None:
    """An ended process keeps its name until its parent has looked at it."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.name())
    except psutil.NoSuchProcess:
        return None


def _open_child(name: str) -> int:
    """A pidfd, which becomes readable when the process ends."""
    for child in psutil.Process().children():
        if child.name() == name:
            return os.pidfd_open(child.pid)
    raise Unavailable(f"Ray's {name} is not running")
