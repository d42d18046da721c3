"""Ending a process for certain. A pidfd names one process for ever: a pid that is used again cannot be hit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import psutil

REAP_POLL_S = 0.02
REAP_POLLS = 50


class ProcessHandle:
    """One process of this host; not necessarily a child of ours."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None  # gone before we could hold on to it

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process. Does nothing when it is gone."""
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def wait_gone(self, deadline_s: float) -> bool:
        """Whether the process has ended within `deadline_s`."""
        if self._fd is None:
            return True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._fd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), deadline_s)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._fd)
        await self._wait_reaped()
        self.close()
        return True

    async def _wait_reaped(self) -> None:
        """An ended process keeps its pid until its parent has looked at it: harmless, so this waits only a moment."""
        for _ in range(REAP_POLLS):
            try:
                if self._fd is None:
                    return
                signal.pidfd_send_signal(self._fd, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(REAP_POLL_S)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def list_descendants() -> list[psutil.Process]:
    """Every process that comes from us right now, children's children too."""
    return psutil.Process().children(recursive=True)


def kill_remaining(processes: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """Waits up to `grace_s` for all to end, then kills the rest; gives those that even outlive that."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, stuck = psutil.wait_procs(alive, timeout=2.0)
    return list(stuck)
