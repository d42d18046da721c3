"""What this machine has for us: cores, memory, GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from cluster.sizes import Machine

CGROUP = Path("/sys/fs/cgroup")


def read_machine() -> Machine:
    """Cores that this process may use, and memory that can be had without swapping, also inside a container."""
    return Machine(cores=sorted(os.sched_getaffinity(0)), available_bytes=_available_bytes(CGROUP))


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use. Asks the driver, through Ray's own reader: no torch here."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Nvidia  # noqa: PLC0415 - a second

    return count_visible(
        Nvidia.get_current_process_visible_accelerator_ids(), Nvidia.get_current_node_num_accelerators()
    )


def count_visible(ids: list[str] | None, num_present: int) -> int:
    """How many of the GPUs that are there CUDA_VISIBLE_DEVICES leaves; ids: its list, None when it is not set.

    CUDA ends the list at the first -1.
    """
    if ids is None:
        return num_present
    ids = [each.strip() for each in ids]
    return min(len(ids[: ids.index("-1")] if "-1" in ids else ids), num_present)


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
