"""What this machine has for us: cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from cluster.sizes import Machine

CGROUP = Path("/sys/fs/cgroup")


def read_machine() -> Machine:
    """Cores that this process may use, and memory that can be had without swapping, also inside a container."""
    return Machine(cores=sorted(os.sched_getaffinity(0)), available_bytes=_available_bytes(CGROUP))


def _available_bytes(cgroup: Path) -> int:
    free = int(psutil.virtual_memory().available)
    limit = _read_bytes(cgroup / "memory.max")
    used = _read_bytes(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    return min(free, max(limit - used + _reclaimable_bytes(cgroup), 0))


def _read_bytes(file: Path) -> int | None:
    """The number in a cgroup's file; None without such a file, or where it says "max"."""
    try:
        text = file.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable_bytes(cgroup: Path) -> int:
    """Page cache that the kernel would give back at once; memory.current counts it as used."""
    try:
        lines = (cgroup / "memory.stat").read_text("ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
