"""Watches the processes that Ray itself consists of: without any one of them nothing of a cluster can go on.

Ray's library would say nothing for a minute and then abort this process, so this is a thread of its own, which neither
Ray nor a blocked event loop can hold up.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

import psutil

from pd_core.errors import Unavailable

VITAL = ("gcs_server", "raylet")


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


def _open_child(name: str) -> int:
    """A pidfd, which becomes readable when the process ends."""
    for child in psutil.Process().children():
        if child.name() == name:
            return os.pidfd_open(child.pid)
    raise Unavailable(f"Ray's {name} is not running")
