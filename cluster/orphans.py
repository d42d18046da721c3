"""Processes whose parent dies come to us instead of to init: so none that came from us is ever lost sight of."""

from __future__ import annotations

import ctypes
import os

from cluster.processes import kill_remaining, list_descendants

PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 3
"""A process that dies while it starts another leaves that one for the next round."""


def adopt_orphans(*, wanted: bool) -> None:
    """For this process. Raises OSError when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def kill_all_descendants() -> list[int]:
    """SIGKILL to everything that came from us, orphans too; gives the pids of those that go on regardless."""
    stuck: list[int] = []
    for _ in range(ROUNDS):
        processes = list_descendants()
        if not processes:
            return []
        stuck = [process.pid for process in kill_remaining(processes, grace_s=0.0)]
    return stuck
