"""The whole product against one process: same weights, same questions, the very same tokens, however it is run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from conversations import Client, References
from questions import Question, load_questions

from cluster.actors import real_actors
from cluster.launch import Cluster
from cluster.ray_runtime import RayRuntime
from pd_core.config import parse_config
from pd_core.layout import DType
from pd_model.folder import default_cache_dir

SEED = 7
CHUNK_TOKENS = 64
"""Several chunks a prompt, so that pushes and computing overlap."""
ARRIVAL_S = 0.25
"""On average a conversation begins so long after another."""


@dataclass(frozen=True)
class Shape:
    """One kind of cluster and how it is loaded.

    sections:     of the config
    max_tokens:   of every answer
    arrival_s:    on average a conversation begins so long after another
    path:         what all KV has to have moved over; None where nothing is handed over
    must_preempt: whether sequences have to have been preempted on the way
    """

    name: str
    sections: dict[str, dict[str, Any]]
    path: str | None
    max_tokens: int = 32
    arrival_s: float = ARRIVAL_S
    must_preempt: bool = False

    def __str__(self) -> str:
        return self.name


def shape(name: str, num_prefill: int, num_decode: int, path: str, **more: Any) -> Shape:
    sections = {
        "prefill": {"num_workers": num_prefill, "chunk_tokens": CHUNK_TOKENS},
        "decode": {"num_workers": num_decode},
        "transfer": {"path": path},
    }
    return Shape(name, sections, path if num_prefill else None, **more)


def tight(name: str, num_prefill: int, path: str) -> Shape:
    """A decode pool of hardly more than the longest conversation needs, and answers that outgrow what is left for
    growth when they begin."""
    loose = shape(name, num_prefill, 1, path, max_tokens=64, arrival_s=ARRIVAL_S / 5, must_preempt=True)
    decode = loose.sections["decode"] | {"num_blocks": 40}
    return replace(loose, sections=loose.sections | {"decode": decode})


ONE_SHM = shape("1P1D shm", 1, 1, "shm")
ONE_TCP = shape("1P1D tcp", 1, 1, "tcp")
TWO_SHM = shape("2P2D shm", 2, 2, "shm")
TWO_TCP = shape("2P2D tcp", 2, 2, "tcp")
BOTH = shape("both phases on one", 0, 1, "auto")
BOTH_TWICE = shape("both phases on each of two", 0, 2, "auto")
TIGHT_SHM = tight("1P1D shm preempted", 1, "shm")
TIGHT_BOTH = tight("both phases on one preempted", 0, "auto")

QUICK: list[tuple[Shape, DType]] = [
    *((each, "bfloat16") for each in (ONE_SHM, ONE_TCP, TWO_SHM, TWO_TCP, BOTH, BOTH_TWICE, TIGHT_SHM, TIGHT_BOTH)),
    *((each, "float32") for each in (ONE_TCP, TWO_SHM, BOTH, TIGHT_SHM)),
]
ALL: list[tuple[Shape, DType]] = [
    *((each, "bfloat16") for each in (ONE_SHM, ONE_TCP, TWO_SHM, TWO_TCP, BOTH, TIGHT_SHM)),
    *((each, "float32") for each in (ONE_TCP, TWO_SHM, TIGHT_SHM)),
]


async def run_identity(
    questions: list[Question], shape: Shape, dtype: DType, references: References, kernels: str = "auto"
) -> None:
    """Conversations through a cluster of real processes, then each of their requests alone in this one."""
    router = {"port": 0, "max_queue": 1000, "queue_timeout_s": 3600.0, "request_timeout_s": 3600.0}
    config = parse_config({"model": {"dtype": dtype, "kernels": kernels}, "router": router} | shape.sections)
    cluster = Cluster(
        actors=real_actors(), cache_dir=default_cache_dir(), log_files=None, limits=None, on_progress=lambda _: None
    )
    address = await cluster.start(config)
    try:
        client = Client(address.url, references.folder, SEED, shape.arrival_s * len(questions), shape.max_tokens)
        turns = await client.hold_all(questions)
        async with httpx.AsyncClient(base_url=address.url) as http:
            ledgers = (await http.get("/debug/ledger")).json()
            metrics = (await http.get("/metrics")).text
    finally:
        await cluster.stop(grace_s=2.0)
    assert len(turns) == 4 * len(questions)
    assert len(ledgers["workers"]) == len(address.endpoints)
    for worker in ledgers["workers"].values():
        assert worker["counts"]["free"] == worker["counts"]["total"]
    assert paths_used(metrics) == ({shape.path} if shape.path else set())
    if shape.must_preempt:
        assert num_preemptions(metrics) > 0
    references.check(turns, dtype, kernels)


def paths_used(metrics: str) -> set[str]:
    """Transports that have carried KV."""
    found = re.findall(r'^kvrelay_handoff_bytes_total\{path="(\w+)"\} (\S+)$', metrics, re.MULTILINE)
    return {path for path, num_bytes in found if float(num_bytes) > 0}


def num_preemptions(metrics: str) -> float:
    """Over all workers."""
    counts = re.findall(r"^kvrelay_worker_preemptions_total{.*} (\S+)$", metrics, re.MULTILINE)
    assert counts, "no worker counts them"
    return sum(map(float, counts))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("shape", "dtype"), QUICK, ids=str)
async def test_eight_conversations_give_the_tokens_of_one_process(
    shape: Shape, dtype: DType, references: References, traces: Path | None, ray_local: RayRuntime
) -> None:
    await run_identity(load_questions(traces, 8), shape, dtype, references)


@pytest.mark.timeout(400)
async def test_torch_kernels_give_the_tokens_of_one_process_too(
    references: References, traces: Path | None, ray_local: RayRuntime
) -> None:
    await run_identity(load_questions(traces, 2), ONE_TCP, "bfloat16", references, kernels="sdpa")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype"), ALL, ids=str)
async def test_all_conversations_give_the_tokens_of_one_process(
    shape: Shape, dtype: DType, references: References, traces: Path | None, ray_local: RayRuntime
) -> None:
    await run_identity(load_questions(traces), shape, dtype, references)
