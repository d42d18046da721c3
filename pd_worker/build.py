"""From the config to an engine and the pool that it works on: in memory, or on a device with a ring beside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from pd_core.config import Config
from pd_core.engine import Engine
from pd_core.errors import ConfigError
from pd_core.layout import BLOCK_TOKENS
from pd_engine.fake import DECODE_FACTOR, FAKE_LAYOUT, PREFILL_FACTOR, FakeEngine
from pd_worker.device_ring import DeviceRing
from pd_worker.memory import PoolMemory
from pd_worker.worker_pool import WorkerPool

_log = logging.getLogger(__name__)

FAKE_PATH = "fake"
RING_CHUNKS = 4
"""Prefill chunks that a ring holds: one is made, one copied, one on the wire, and one of another request."""
_FACTORS = {"prefill": PREFILL_FACTOR, "decode": DECODE_FACTOR}

Role = Literal["prefill", "decode"]


def build_engine(config: Config, role: Role, num_threads: int, cache_dir: Path) -> tuple[Engine, WorkerPool]:
    """The role's engine and its pool of `num_blocks` blocks; the pool is the caller's to close, after the engine.

    The fake engine of the two roles has different weights, so that a token shows who made it.
    Raises ConfigError when the size of the pool has not been chosen, ModelError, EngineError.
    """
    section = config.prefill if role == "prefill" else config.decode
    if section.num_blocks is None:
        raise ConfigError(f"{role}.num_blocks has not been chosen", param=f"{role}.num_blocks")
    if config.model.path == FAKE_PATH:
        return _fake(config, role, section.num_blocks)
    return _real(config, section.num_blocks, num_threads, cache_dir)


def _fake(config: Config, role: Role, num_blocks: int) -> tuple[Engine, WorkerPool]:
    memory = PoolMemory(num_blocks, FAKE_LAYOUT.block_bytes)
    times = config.model.fake
    engine = FakeEngine(
        _FACTORS[role],
        memory,
        step_s=times.step_s,
        prefill_token_s=times.token_s,
        context_tokens=times.context_tokens,
    )
    return engine, WorkerPool(memory, None)


def ring_blocks(chunk_tokens: int, num_blocks: int) -> int:
    """How many blocks a ring has beside a device's pool of `num_blocks`, for prefill chunks of `chunk_tokens`."""
    return min(num_blocks, RING_CHUNKS * chunk_tokens // BLOCK_TOKENS)


def _real(config: Config, num_blocks: int, num_threads: int, cache_dir: Path) -> tuple[Engine, WorkerPool]:
    from pd_engine.device_copies import copies_for  # noqa: PLC0415 - torch, which the fake does without
    from pd_engine.loader import load_engine, load_on_device, plan_engine  # noqa: PLC0415
    from pd_model.folder import open_model  # noqa: PLC0415

    folder = open_model(config.model.path, cache_dir)
    model = config.model
    plan = plan_engine(folder, model.dtype, cache_dir, model.kernels, model.device, model.weights)
    if plan.why is not None:
        _log.warning("torch's kernels run the model: %s", plan.why)
    if plan.device.type == "cpu":
        memory = PoolMemory(num_blocks, plan.layout.block_bytes)
        return load_engine(plan, memory, num_threads=num_threads), WorkerPool(memory, None)
    engine, pool = load_on_device(plan, num_blocks, num_threads=num_threads)
    memory = PoolMemory(ring_blocks(config.prefill.chunk_tokens, num_blocks), plan.layout.block_bytes)
    return engine, WorkerPool(memory, DeviceRing(memory, copies_for(pool, memory), num_blocks))
