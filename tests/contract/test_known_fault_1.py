"""Known fault 1: a prefill and a decode worker that keep different KV pair up, and what comes out is wrong.

Right: they refuse each other, naming both values, over every path and under any load; the prefill worker goes on
serving others; the router is not ready and says why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from known_ucx import known_ucx
from transport_parts import FINGERPRINT, LAYOUT, SECRET, Pair, SharedMemory, identity
from waiting import until
from worker_rig import (
    HANDOFF_PATHS,
    Rig,
    connect,
    expected_tokens,
    failure_of,
    make_request,
    small_config,
    workers,
)
from worker_rig import SECRET as WORKERS_SECRET

from decode_worker.worker import DecodeWorker
from kv_transport.paths import make_receiver, make_sender
from pd_core.config import RouterConfig, TransferConfig
from pd_core.engine import Engine
from pd_core.errors import LayoutMismatch, Overloaded
from pd_core.layout import Fingerprint
from pd_engine.fake import DECODE_FACTOR, FAKE_LAYOUT, FakeEngine
from pd_model.fake import fake_model
from pd_worker.memory import PoolMemory
from router.service import RouterService

SOCKET_PATHS = [path for path in HANDOFF_PATHS if path != "inproc"]
REFUSED_S = 2.0
NUM_AT_ONCE = 32


def of_layout(**changes: object) -> Fingerprint:
    return msgspec.structs.replace(FINGERPRINT, layout=msgspec.structs.replace(LAYOUT, **changes))


OTHERS = {
    "dtype": (of_layout(dtype="bfloat16"), "'uint8'", "'bfloat16'"),
    "block size": (of_layout(name="plain, 32 tokens", num_layers=4), "'plain'", "'plain, 32 tokens'"),
    "arrangement": (of_layout(name="keys first"), "'plain'", "'keys first'"),
    "tensor-parallel degree": (of_layout(num_kv_heads=1), "num_kv_heads=2", "num_kv_heads=1"),
    "weights": (msgspec.structs.replace(FINGERPRINT, weights="others"), "'weights'", "'others'"),
    "numerics": (msgspec.structs.replace(FINGERPRINT, numerics="others"), "'numerics'", "'others'"),
}


@pytest.mark.parametrize("path", SOCKET_PATHS)
@pytest.mark.parametrize("kind", OTHERS)
async def test_pools_that_differ_refuse_each_other_naming_both_and_the_sender_serves_the_other(
    kind: str, path: Any
) -> None:
    fingerprint, ours, theirs = OTHERS[kind]
    transfer = TransferConfig(path=path)
    source, target = SharedMemory(8, LAYOUT.block_bytes), SharedMemory(8, LAYOUT.block_bytes)
    different = SharedMemory(8, fingerprint.layout.block_bytes)
    with known_ucx():
        sender = make_sender(source, identity("prefill"), SECRET, transfer)
        receivers = [
            make_receiver(target, identity("decode"), SECRET, transfer),
            make_receiver(different, identity("decode", fingerprint), SECRET, transfer),
        ]
    try:
        for receiver in receivers:
            await receiver.start()
        fitting, wrong = (Pair(source, target, receiver, sender) for receiver in receivers)
        ticket, arrivals = wrong.open([0, 1])
        for num_pushes in (1, NUM_AT_ONCE):
            async with asyncio.timeout(REFUSED_S):
                pushes = (wrong.push(ticket, [0, 1], [2, 3]) for _ in range(num_pushes))
                outcomes = await asyncio.gather(*pushes, return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, LayoutMismatch), outcome
                assert ours in outcome.message
                assert theirs in outcome.message
        assert arrivals.events == []
        assert not any(different.buffer)
        right, right_arrivals = fitting.open([4, 5])
        await fitting.push(right, [0, 1], [2, 3])
        await right_arrivals.until(lambda a: a.verified == {0, 1})
    finally:
        await sender.close()
        for receiver in receivers:
            await receiver.close()
        for memory in (source, target, different):
            memory.close()


class OtherKv:
    """The engine, which says that it keeps another kind of KV."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def fingerprint(self) -> Fingerprint:
        layout = msgspec.structs.replace(FAKE_LAYOUT, dtype="bfloat16", head_dim=FAKE_LAYOUT.head_dim // 2)
        return msgspec.structs.replace(self._engine.fingerprint, layout=layout)


@contextlib.asynccontextmanager
async def different_decode(path: Any) -> AsyncIterator[DecodeWorker]:
    """A decode worker that keeps bfloat16 where the others keep uint8."""
    config = small_config()
    transfer = msgspec.structs.replace(config.transfer, path=path)
    memory = PoolMemory(64, FAKE_LAYOUT.block_bytes)
    with known_ucx():
        worker = DecodeWorker(
            name="decode-1",
            incarnation="decode-1-boot",
            secret=WORKERS_SECRET,
            config=msgspec.structs.replace(config, transfer=transfer),
            engine=OtherKv(FakeEngine(DECODE_FACTOR, memory)),  # type: ignore[arg-type]
            memory=memory,
            transport=lambda _, identity: make_receiver(memory, identity, WORKERS_SECRET, transfer),
        )
    try:
        yield worker
    finally:
        await worker.stop(0.5)
        memory.close()


async def served(rig: Rig, name: str) -> None:
    """Its stream is right, whoever else is refused meanwhile."""
    while (failure := await failure_of(rig, make_request(name, 40, 4))) is not None:
        assert isinstance(failure, Overloaded), failure
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", SOCKET_PATHS)
async def test_handoffs_between_workers_that_differ_fail_soon_and_disturb_no_other(path: str) -> None:
    """Whatever a router does that does not look."""
    async with workers(path) as rig, different_decode(path) as other:
        end = await other.start()
        to_other = await connect(end)
        wrong = Rig(rig.prefill, other, rig.prefill_end, end, rig.to_prefill, to_other)
        try:
            for num_requests in (1, 32):
                rights = [asyncio.ensure_future(served(rig, f"right-{num_requests}-{n}")) for n in range(4)]
                runs = [wrong.run(make_request(f"wrong-{num_requests}-{n}", 40, 4)) for n in range(num_requests)]
                async with asyncio.timeout(REFUSED_S):
                    outcomes = await asyncio.gather(*(run.tokens() for run in runs), return_exceptions=True)
                assert all(isinstance(outcome, LayoutMismatch | Overloaded) for outcome in outcomes), outcomes
                mismatches = [outcome for outcome in outcomes if isinstance(outcome, LayoutMismatch)]
                assert mismatches
                assert all("'uint8'" in m.message and "'bfloat16'" in m.message for m in mismatches)
                await asyncio.gather(*rights)
            await until(lambda: other.shell.ledger.counts().is_idle, 3.0)
            await rig.wait_idle()
        finally:
            await to_other.close()


async def test_a_router_with_such_a_pair_alone_is_not_ready_and_says_what_differs() -> None:
    prompt = "user: hi\nassistant: "
    config = msgspec.structs.replace(small_config(), router=RouterConfig(port=0, queue_timeout_s=1.0))
    async with workers("tcp", config) as rig, different_decode("tcp") as other:
        router = RouterService(config, WORKERS_SECRET, fake_model())
        host, port = await router.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
                end = await other.start()
                await router.set_workers([rig.prefill_end, end])
                await until(lambda: len(router.ready()["kv_mismatches"]) == 1)
                ready = await client.get("/ready")
                assert ready.status_code == 503
                assert "'uint8'" in ready.json()["reason"]
                assert "'bfloat16'" in ready.json()["reason"]
                body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
                for num_requests in (1, 32):
                    async with asyncio.timeout(REFUSED_S):
                        posts = (client.post("/v1/chat/completions", json=body) for _ in range(num_requests))
                        replies = await asyncio.gather(*posts)
                    for reply in replies:
                        assert reply.status_code == 503
                        assert reply.json()["error"]["message"]
                await router.set_workers([rig.prefill_end, end, rig.decode_end])
                await until(lambda: router.ready()["ready"])
                replies = await asyncio.gather(
                    *(client.post("/v1/chat/completions", json=body | {"return_token_ids": True}) for _ in range(8))
                )
                ids = fake_model().tokenizer.encode(prompt)
                for reply in replies:
                    assert reply.json()["choices"][0]["token_ids"] == expected_tokens(ids, 3)
                assert other.shell.counters.values()["handoffs_committed_total"] == 0
        finally:
            await router.stop(0.2)
