"""What an actor does to its own process before it builds anything."""

from __future__ import annotations

import logging
import logging.handlers
import os
from collections.abc import Sequence
from pathlib import Path

from pd_core.logs import JsonLines

LOG_FILE_BYTES = 16 << 20
NUM_OLD_LOG_FILES = 2
COMPUTING_NICE = 5
"""By how much threads that compute are nicer than the others of their process."""
LOWEST_NICE = 19


def compute_on(cores: Sequence[int]) -> None:
    """The calling thread, and those that it starts, run on these cores alone, and leave a core at once to any other
    thread of ours that wakes up. Without cores they run wherever the process may.

    For threads that compute. All others of a worker, its event loop, receivers and Ray's, may run on any core: what
    they do is short, and beside one that computes they find their caches emptied at every step, and take its time.

    With equal shares a thread that has been computing keeps its core for the rest of a time slice, milliseconds, while
    the event loop and the receivers of KV wait, who have a tenth of a millisecond's work; and when nobody else wants
    the core, a lower share takes nothing away. (Being a batch thread, the kernel's other way to say so, did not help.)
    The price: beside another process of the same session that never rests, they get a quarter of a core they share and
    not half. It cannot be taken back without privileges, so it is for threads that end or compute for ever.

    Raises OSError when this process may not run on any of the cores.
    """
    own = 0  # to Linux the thread that calls, not its process
    if cores:
        os.sched_setaffinity(own, cores)
    nice = os.getpriority(os.PRIO_PROCESS, own) + COMPUTING_NICE
    os.setpriority(os.PRIO_PROCESS, own, min(nice, LOWEST_NICE))


def log_to(path: Path | None) -> None:
    """All log lines of this process as JSON: to a private file of bounded size, or to standard error."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler()
    else:
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_FILE_BYTES, backupCount=NUM_OLD_LOG_FILES, encoding="utf-8"
        )
        path.chmod(0o600)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
