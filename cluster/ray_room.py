"""Whether Ray has what the actors will ask for: one that asks for more than there is would wait without a word."""

from __future__ import annotations

import asyncio
import time

import ray

from pd_core.errors import Unavailable

WAIT_S = 5.0
"""Devices of a cluster that has just ended may take a moment to be free."""
POLL_S = 0.1


async def wait_for_gpus(num_needed: int, wait_s: float = WAIT_S) -> None:
    """Returns when Ray has so many GPUs to give. Raises Unavailable, with the numbers, when it has not by then."""
    deadline_s = time.monotonic() + wait_s
    while num_needed > (num_free := _num_free()):
        if time.monotonic() >= deadline_s:
            total = int(ray.cluster_resources().get("GPU", 0))
            raise Unavailable(
                f"Ray has {total} GPUs, {num_free} of them free; model.device cuda needs {num_needed}, one a worker",
                param="model.device",
            )
        await asyncio.sleep(POLL_S)


def _num_free() -> int:
    return int(ray.available_resources().get("GPU", 0))
