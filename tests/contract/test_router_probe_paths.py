"""POST /debug/paths, and what the router says of paths and of pairs that can hand nothing over; with real workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from waiting import until
from worker_rig import SECRET, Rig, small_config, workers
from wrong_address import nobody_answers

from kv_transport import path_book
from pd_core.config import RouterConfig
from pd_core.messages import PathsProbed
from pd_engine.fake import FAKE_LAYOUT, FAKE_NUMERICS
from pd_model.fake import fake_model
from router.path_probes import prompt_rate
from router.service import RouterService
from router.timeline import Timeline


class System:
    def __init__(self, rig: Rig, router: RouterService, http: httpx.AsyncClient) -> None:
        self.rig = rig
        self.router = router
        self.http = http

    async def lines(self, body: object = None) -> list[dict[str, Any]]:
        reply = await self.http.post("/debug/paths", json=body or {})
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) for line in reply.text.splitlines()]

    async def complete(self, max_tokens: int = 3, num_characters: int = 80) -> httpx.Response:
        body = {"model": "fake", "prompt": "x" * num_characters, "max_tokens": max_tokens, "ignore_eos": True}
        return await self.http.post("/v1/completions", json=body)

    async def metric(self, name: str, **labels: str) -> float | None:
        """Of the first sample that has these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(f"{name}{{") and all(each in line for each in wanted):
                return float(line.rsplit(" ", 1)[1])
        return None


@contextlib.asynccontextmanager
async def system(path: str = "auto", **rig_changes: Any) -> AsyncIterator[System]:
    config = small_config(router=RouterConfig(port=0))
    transfer = config.transfer if path == "inproc" else msgspec.structs.replace(config.transfer, path=path)
    config = msgspec.structs.replace(config, transfer=transfer)
    async with workers(path, config, **rig_changes) as rig:
        router = RouterService(config, SECRET, fake_model())
        host, port = await router.start()
        try:
            await router.set_workers([rig.prefill_end, rig.decode_end])
            await until(lambda: all(w["health"] == "ready" for w in router.ready()["workers"]), within_s=5.0)
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=20.0) as http:
                yield System(rig, router, http)
        finally:
            await router.stop(grace_s=0.2)


async def test_every_pair_is_probed_and_each_is_a_line() -> None:
    async with system() as on:
        head, pair = await on.lines({"num_blocks": 4, "num_rounds": 2})
        assert head["object"] == "paths"
        assert (head["transfer_path"], head["num_pairs"], head["num_blocks"], head["num_rounds"]) == ("auto", 1, 4, 2)
        assert (head["chunk_tokens"], head["block_tokens"], head["has_prefill_workers"]) == (32, 16, True)
        assert [worker["name"] for worker in head["workers"]] == ["decode-0", "prefill-0"]
        assert (pair["object"], pair["prefill"], pair["decode"]) == ("pair", "prefill-0", "decode-0")
        assert (pair["in_use"], pair["how"], pair["block_bytes"]) == ("shm", "shm", FAKE_LAYOUT.block_bytes)
        assert [(path["path"], path["reason"]) for path in pair["paths"]] == [("shm", None), ("tcp", None)]
        assert all(path["bytes_per_s"] > 0 and path["latency_s"] > 0 for path in pair["paths"])
        assert pair["prefill_tokens_per_s"] is None
        assert on.rig.is_idle


async def test_the_prefill_rate_is_that_of_whole_chunks_of_answered_requests() -> None:
    async with system("tcp") as on:
        assert (await on.complete(num_characters=100)).status_code == 200
        await until(lambda: any(timeline.chunks for timeline in on.router.serving.recent), 2.0)
        _, pair = await on.lines()
        assert pair["prefill_tokens_per_s"] > 0


def test_chunks_that_shared_their_step_or_that_others_computed_say_nothing_of_the_rate() -> None:
    def timeline(worker: str, *chunks: tuple[int, float]) -> Timeline:
        done = [{"start": 0, "num_tokens": num, "began_s": 0.0, "took_s": took_s} for num, took_s in chunks]
        known = {"request_id": "r", "num_prompt": 9, "arrived_s": 0.0, "queued_s": 0.0, "prefill": worker}
        return msgspec.convert(known | {"chunks": done}, Timeline)

    timelines = [timeline("p0", (32, 0.1), (32, 0.2), (32, 0.4), (7, 0.001)), timeline("p1", (32, 0.01))]
    assert prompt_rate(timelines, "p0", 32) == 160.0
    assert prompt_rate(timelines, "p2", 32) is None
    assert prompt_rate([timeline("p0", (31, 0.1), (32, 0.0))], "p0", 32) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b"{", None),
        (b'{"num_blocks": "many"}', "num_blocks"),
        (b'{"num_blocks": 0}', "num_blocks"),
        (b'{"num_rounds": -1}', "num_rounds"),
        (b'{"num_pushes": 1}', None),
    ],
)
async def test_an_order_that_is_none_is_refused_by_its_fields_name(body: bytes, param: str | None) -> None:
    async with system("inproc") as on:
        headers = {"content-type": "application/json"}
        reply = await on.http.post("/debug/paths", content=body, headers=headers)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert (await on.http.post("/debug/paths", content=b"x" * 5000, headers=headers)).status_code == 413
        assert (await on.http.post("/debug/paths", data={"num_blocks": "1"})).status_code == 415
        assert (await on.http.get("/debug/paths")).status_code == 405


async def test_only_one_run_of_probes_at_a_time_and_one_whose_client_leaves_is_over_at_once() -> None:
    async with system("inproc") as on:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def stalled(*_: object) -> PathsProbed:
            began.set()
            try:
                await asyncio.sleep(60.0)
            finally:
                cancelled.set()
            raise AssertionError

        on.router.fleet.probe_paths = stalled  # type: ignore[method-assign]
        first = asyncio.ensure_future(on.lines())
        await began.wait()
        refused = await on.http.post("/debug/paths", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        first.cancel()
        async with asyncio.timeout(2.0):
            await cancelled.wait()
        del on.router.fleet.probe_paths
        await until(lambda: on.router.serving.fleet is not None, 1.0)
        assert len(await on.lines()) == 2


async def test_a_pair_that_cannot_be_probed_now_is_a_line_that_says_why() -> None:
    async with system("tcp") as on:
        taken = on.rig.decode.shell.ledger.try_hold("somebody", 60)
        assert taken is not None
        _, pair = await on.lines({"num_blocks": 8})
        assert pair["error"]["code"] == "overloaded"
        assert "8 blocks; 4 are free" in pair["error"]["message"]
        on.rig.decode.shell.ledger.release("somebody")


async def test_workers_whose_kv_differs_are_no_pair_and_everybody_is_told_both_values() -> None:
    both = rf"numerics: ours 'another', theirs '{FAKE_NUMERICS}'"
    async with system("tcp", prefill_numerics="another") as on:
        ready = await on.http.get("/ready")
        assert ready.status_code == 503
        assert both in ready.json()["reason"]
        [mismatch] = ready.json()["kv_mismatches"]
        assert (mismatch["prefill"], mismatch["decode"]) == ("prefill-0", "decode-0")
        assert both in mismatch["why"]
        began_s = asyncio.get_running_loop().time()
        for reply in await asyncio.gather(*(on.complete() for _ in range(32))):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            assert both in reply.json()["error"]["message"]
        assert asyncio.get_running_loop().time() - began_s < 2.0
        _, pair = await on.lines()
        assert pair["error"]["code"] == "layout_mismatch"
        assert both in pair["error"]["message"]
        assert on.rig.is_idle


async def test_a_fall_back_is_seen_by_everybody_who_looks_until_the_path_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(path_book, "FIRST_RETRY_S", 0.3)
    fallbacks = {"worker": "prefill-0", "path": "tcp", "instead_of": "shm"}
    async with system() as on:
        put_right = nobody_answers(on.rig, "shm")
        reply = await on.complete()
        await until(lambda: any(timeline.how for timeline in on.router.serving.recent), 2.0)
        transfer = (await on.http.get(f"/v1/requests/{reply.json()['id']}")).json()["transfer"]
        assert transfer["path"] == "tcp"
        assert transfer["how"].startswith("tcp (shm failed, ")
        [by_path] = transfer["by_path"]
        assert (by_path["path"], by_path["num_bytes"]) == ("tcp", transfer["num_bytes"])
        assert by_path["gb_per_s"] == transfer["gb_per_s"] > 0
        assert await on.metric("kvrelay_transfer_bytes_total", path="tcp") == transfer["num_bytes"]
        assert await on.metric("kvrelay_transfer_bytes_per_second_count", path="tcp") == 1.0
        await until(lambda: "tcp" in worker(on.router, "prefill-0")["transfers"], 2.0)
        assert worker(on.router, "prefill-0")["kv_paths"]["decode-0"].startswith("tcp (shm failed, ")
        assert await on.metric("kvrelay_worker_kv_fallbacks_total", **fallbacks) >= 1.0
        assert await on.metric("kvrelay_worker_kv_push_failures_total", path="shm", reason="unreachable") >= 1.0
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert sum("KV path shm" in sentence for sentence in said) == 1

        put_right()

        async def is_back() -> bool:
            reply = await on.complete()
            await until(lambda: on.router.serving.recent.find(reply.json()["id"]) is not None, 2.0)
            page = (await on.http.get(f"/v1/requests/{reply.json()['id']}")).json()
            return page["transfer"]["path"] == "shm"

        async with asyncio.timeout(5.0):
            while not await is_back():
                await asyncio.sleep(0.1)
        await until(lambda: worker(on.router, "prefill-0")["kv_paths"] == {"decode-0": "shm"}, 2.0)


def worker(router: RouterService, name: str) -> dict[str, Any]:
    [found] = [each for each in router.ready()["workers"] if each["name"] == name]
    return found
