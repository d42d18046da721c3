"""Processor time of another process."""

from __future__ import annotations

import psutil

from pd_core.errors import WorkerLost


def cpu_s(pid: int) -> float:
    """Seconds on a core so far, of all its threads, in the program and in the kernel; Linux counts in hundredths.

    Raises WorkerLost when there is no such process.
    """
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error as error:
        raise WorkerLost(f"process {pid} cannot be looked at: {error}") from error
    return float(times.user + times.system)
