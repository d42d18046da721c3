"""What an actor does to its own process before it builds anything."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
from collections.abc import Sequence
from pathlib import Path

from pd_core.logs import JsonLines

LOG_FILE_BYTES = 16 << 20
NUM_OLD_LOG_FILES = 2


def use_cores(cores: Sequence[int]) -> None:
    """Ties every thread of this process, and every one that is started later, to these cores.

    Raises OSError when this process may not run on any of them.
    """
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(entry.name), cores)


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
