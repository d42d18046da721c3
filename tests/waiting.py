"""Waiting for what has no event to wait for: other threads, other processes, the far end of a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.003


async def until(holds: Callable[[], object], within_s: float = 5.0) -> float:
    """Seconds until it held. Fails when it does not within so long."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < within_s, f"it does not hold after {within_s:g} s"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began_s
