"""Runs a bench in a lab and makes its report."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from pathlib import Path

import psutil

from load_tests.lab import Bench, Lab
from load_tests.report import Check, Machine, Report
from pd_core.errors import KvrelayError

LIBRARIES = ("kvrelay", "torch", "ray", "numpy", "msgspec", "uvicorn", "xxhash")
BUSY_LOOK_S = 1.0
QUIET_PERCENT = 10.0
"""More than that before the bench has begun, and whoever reads the figures has to know."""


async def run_bench(bench: Bench, lab: Lab) -> Report:
    """The report, also of a bench that could not come to its end: then it says why, and is not ok."""
    machine = read_machine(lab)
    if machine.busy_percent > QUIET_PERCENT:
        lab.progress(f"the cores are {machine.busy_percent:.0f} % busy with something else: the figures will show it")
    began_s = time.monotonic()
    checks: list[Check] = []
    error: str | None = None
    try:
        checks = await bench.run(lab)
    except KvrelayError as failure:
        error = f"{type(failure).__name__}: {failure.message}"
    return Report(
        name=bench.name,
        machine=machine,
        versions=read_versions(),
        settings=settings_of(lab),
        took_s=time.monotonic() - began_s,
        checks=checks,
        error=error,
        notes=list(lab.notes),
    )


def read_machine(lab: Lab) -> Machine:
    """Takes BUSY_LOOK_S: how busy others keep the cores decides what the figures are worth."""
    return Machine(
        processor=_processor(Path("/proc/cpuinfo")),
        cores=list(lab.cores),
        memory_bytes=int(psutil.virtual_memory().total),
        kernel=platform.release(),
        busy_percent=psutil.cpu_percent(BUSY_LOOK_S),
    )


def read_versions() -> dict[str, str]:
    """Of Python and of the libraries that decide the speed."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}


def settings_of(lab: Lab) -> dict[str, str]:
    """What could be chosen: model and number of rounds."""
    model = lab.config.model
    return {
        "model": model.path or "embedded",
        "dtype": model.dtype,
        "kernels": model.kernels,
        "rounds": str(lab.num_rounds),
        "prefill.chunk_tokens": str(lab.config.prefill.chunk_tokens),
    }


def _processor(file: Path) -> str:
    """The name that Linux knows it by; that of its kind where it knows none."""
    for line in file.read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
