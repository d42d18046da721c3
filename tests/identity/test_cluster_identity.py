"""The whole product against one process: same weights, same questions, the very same tokens."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from conversations import Client, check_against_one_process
from questions import load_questions

from cluster.actors import real_actors
from cluster.launch import Cluster
from cluster.ray_runtime import RayRuntime
from pd_core.config import parse_config
from pd_core.layout import DType
from pd_model.folder import ModelFolder, default_cache_dir

SEED = 7
CHUNK_TOKENS = 64
"""Several chunks a prompt, so that pushes and computing overlap."""


async def run_identity(
    questions_limit: int | None, dtype: DType, folder: ModelFolder, traces: Path | None, kernels: str = "auto"
) -> None:
    """Conversations through a cluster of real processes, then each of their requests alone in this one."""
    config = parse_config(
        {
            "model": {"dtype": dtype, "kernels": kernels},
            "router": {"port": 0, "max_queue": 1000, "queue_timeout_s": 3600.0, "request_timeout_s": 3600.0},
            "prefill": {"chunk_tokens": CHUNK_TOKENS},
        }
    )
    questions = load_questions(traces, questions_limit)
    cluster = Cluster(
        actors=real_actors(), cache_dir=default_cache_dir(), log_files=None, limits=None, on_progress=lambda _: None
    )
    address = await cluster.start(config)
    try:
        turns = await Client(address.url, folder, SEED, spread_s=0.5 * len(questions)).hold_all(questions)
        assert len(turns) == 4 * len(questions)
        async with httpx.AsyncClient(base_url=address.url) as http:
            ledgers = (await http.get("/debug/ledger")).json()
    finally:
        await cluster.stop(grace_s=2.0)
    for worker in ledgers["workers"].values():
        assert worker["counts"]["free"] == worker["counts"]["total"]
    check_against_one_process(turns, folder, dtype, kernels)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_eight_conversations_give_the_tokens_of_one_process(
    dtype: DType, model_folder: ModelFolder, traces: Path | None, ray_local: RayRuntime
) -> None:
    await run_identity(8, dtype, model_folder, traces)


@pytest.mark.timeout(400)
async def test_torch_kernels_give_the_tokens_of_one_process_too(
    model_folder: ModelFolder, traces: Path | None, ray_local: RayRuntime
) -> None:
    await run_identity(2, "bfloat16", model_folder, traces, kernels="sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_all_conversations_give_the_tokens_of_one_process(
    dtype: DType, model_folder: ModelFolder, traces: Path | None, ray_local: RayRuntime
) -> None:
    await run_identity(None, dtype, model_folder, traces)
