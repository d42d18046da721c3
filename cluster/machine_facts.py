"""What `kvrelay doctor` says of the machine that it runs on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import psutil

from cluster.diagnosis import MachineFacts
from cluster.machine import read_machine

PACKAGES = ("kvrelay", "ray", "torch", "msgspec", "ucxx-cu12")
PROC, SYS = Path("/proc"), Path("/sys")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
NOT_TOLD = "the kernel does not say"


def read_facts(proc: Path = PROC, sys: Path = SYS, shared_memory: Path = SHARED_MEMORY) -> MachineFacts:
    machine, pages = read_machine(), sys / "kernel" / "mm" / "transparent_hugepage"
    shm = shutil.disk_usage(shared_memory) if shared_memory.is_dir() else None
    return MachineFacts(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpu=_after_colon(proc / "cpuinfo", "model name") or platform.machine(),
        cores=machine.cores,
        num_cores=os.cpu_count() or len(machine.cores),
        memory_bytes=int(psutil.virtual_memory().total),
        available_bytes=machine.available_bytes,
        shm_bytes=None if shm is None else shm.total,
        shm_free_bytes=None if shm is None else shm.free,
        huge_pages=_chosen(pages / "enabled"),
        shmem_huge_pages=_chosen(pages / "shmem_enabled"),
        num_reserved_huge_pages=int(_after_colon(proc / "meminfo", "HugePages_Total") or 0),
        versions={name: _version(name) for name in PACKAGES},
    )


def _chosen(setting: Path) -> str:
    """The word in brackets of a setting like "always [madvise] never"."""
    try:
        words = setting.read_text("ascii").split()
    except OSError:
        return NOT_TOLD
    return next((word.strip("[]") for word in words if word.startswith("[")), NOT_TOLD)


def _after_colon(file: Path, name: str) -> str | None:
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
