"""GET /v1/requests/{id}, and what /ready says for those who watch a cluster."""

from __future__ import annotations

import asyncio
import json

import httpx
from failing_scripts import Messages
from scripted_worker import chat, made, num_prompt_tokens, stage, until

from pd_core.errors import Overloaded
from pd_core.messages import ChunkDone, PromptAdmitted, PromptComputed, StartBoth, StartDecode, StartPrefill
from router.timeline import RecentTimelines, Timeline


async def test_a_request_that_ended_is_told_from_its_arrival_to_its_end() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.post("/v1/chat/completions", json=chat("a secret"), headers={"x-request-id": "mine"})
        await until(on.is_idle)
        answer = await client.get(f"/v1/requests/{reply.json()['id']}")
        page = answer.json()
        assert answer.status_code == 200
        assert "secret" not in answer.text
        assert (page["id"], page["state"], page["error"]) == (reply.json()["id"], "finished", None)
        assert (page["num_prompt_tokens"], page["num_generated_tokens"]) == (num_prompt_tokens("a secret"), 8)
        moments = page["moments_ms"]
        order = ("queued", "placed", "reserved", "first_token", "last_token", "ended")
        assert [moments[name] for name in order] == sorted(moments[name] for name in order)
        assert moments["preempted"] is None
        [placement] = page["placements"]
        assert (placement["prefill"], placement["decode"], placement["at_ms"]) == ("p0", "d0", moments["placed"])
        assert "p0" in placement["reason"]
        assert placement["prompt_tokens_ahead"] == 0
        assert placement["actual_first_token_ms"] > 0
        assert page["prefill"]["chunks"] == [
            {"start": 0, "num_tokens": 3, "began_ms_after_admission": 0.0, "took_ms": 10.0}
        ]
        assert page["transfer"]["path"] == "tcp"
        assert (page["transfer"]["num_blocks"], page["transfer"]["num_bytes"]) == (1, 4096)
        assert (page["transfer"]["push_ms"], page["transfer"]["path_ms"]) == (10.0, 2.0)
        assert page["transfer"]["gb_per_s"] == round(4096 / 0.002 / 1e9, 4)
        assert on.router.metrics.registry.get_sample_value("kvrelay_transfer_seconds_total", {"path": "tcp"}) == 0.002
        assert page["durations_ms"]["total"] >= page["durations_ms"]["ttft"] > 0


async def test_a_prompt_that_decode_computed_is_told_with_its_chunks() -> None:
    async with stage(num_prefill=0) as on, httpx.AsyncClient(base_url=on.url) as client:

        async def both(body: StartBoth) -> Messages:
            yield PromptAdmitted()
            for index in range(body.request.max_tokens):
                yield made(body.request, index)
                if index == 0:
                    yield PromptComputed([ChunkDone(0, 3, 0.001, 0.002), ChunkDone(3, 2, 0.003, 0.004)], 0.006)

        on.d0.script = both
        for max_tokens in (1, 4):  # when the first token is the last, the report comes after the answer is complete
            reply = await client.post("/v1/chat/completions", json=chat("x") | {"max_tokens": max_tokens})
            await until(on.is_idle)
            page = (await client.get(f"/v1/requests/{reply.json()['id']}")).json()
            assert page["transfer"] is None
            assert (page["prefill"]["compute_ms"], page["prefill"]["num_chunks"]) == (6.0, 2)
            assert page["prefill"]["chunks"][1] == {
                "start": 3,
                "num_tokens": 2,
                "began_ms_after_admission": 3.0,
                "took_ms": 4.0,
            }
        assert not on.d0.cancelled


async def test_a_second_request_of_that_size_says_what_was_expected() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        for _ in range(2):
            reply = await client.post("/v1/chat/completions", json=chat("x"))
        await until(on.is_idle)
        page = (await client.get(f"/v1/requests/{reply.json()['id']}")).json()
        assert page["placements"][0]["expected_first_token_ms"] > 0


async def test_requests_that_wait_or_run_are_told_as_far_as_they_are() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        gate, usual = asyncio.Event(), on.handoffs.prefill

        async def prefill(body: StartPrefill) -> Messages:
            await gate.wait()
            async for message in usual(body):
                yield message

        on.p0.script = prefill
        sent = [asyncio.create_task(client.post("/v1/chat/completions", json=chat(f"{i}"))) for i in range(2)]
        await until(lambda: on.router.serving.num_waiting == 1 and len(on.p0.started) == 1)
        pages = {
            request_id: (await client.get(f"/v1/requests/{request_id}")).json()
            for request_id in on.router.serving._runs
        }
        assert sorted(page["state"] for page in pages.values()) == ["prefilling", "queued"]
        assert all(page["moments_ms"]["ended"] is None for page in pages.values())
        gate.set()
        await asyncio.gather(*sent)


async def test_choices_of_one_request_are_told_together() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        body = {"model": "fake", "prompt": ["one", "two"], "max_tokens": 4}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        await until(on.is_idle)
        reply_id = reply.json()["id"]
        page = (await client.get(f"/v1/requests/{reply_id}")).json()
        assert [choice["id"] for choice in page["choices"]] == [f"{reply_id}-0", f"{reply_id}-1"]
        assert (await client.get(f"/v1/requests/{reply_id}-1")).json() == page["choices"][1]


async def test_an_unknown_id_and_one_that_a_client_chose_are_not_found() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        await client.post("/v1/chat/completions", json=chat("x"), headers={"x-request-id": "mine"})
        for request_id in ("mine", "chatcmpl-0", "%00", "x" * 2000):
            answer = await client.get(f"/v1/requests/{request_id}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"


async def test_only_the_last_ones_are_remembered() -> None:
    recent = RecentTimelines(max_kept=3)
    for number in range(5):
        recent.add(Timeline(f"r{number}", 1, 0.0, 0.0))
    assert [timeline.request_id for timeline in recent] == ["r2", "r3", "r4"]
    assert recent.find("r1") is None


async def test_ready_tells_who_watches_the_cluster_all_that_is_known() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        await client.post("/v1/chat/completions", json=chat("x"))
        await until(on.is_idle)
        await until(lambda: on.router.ready()["throughput"]["generated_tokens_per_s"] > 0)
        detail = json.loads((await client.get("/ready")).text)
        assert detail["max_queue"] == 64
        assert detail["throughput"]["prompt_tokens_per_s"] > 0
        worker = next(worker for worker in detail["workers"] if worker["name"] == "p0")
        assert worker["port"] == on.endpoints[0].port
        assert (worker["role"], worker["pid"], worker["host"]) == ("prefill", 1, "127.0.0.1")
        assert (worker["num_ours"], worker["num_to_compute"], worker["num_running"]) == (0, 0, 0)
        assert worker["blocks"]["total"] == 64
        assert worker["counters"] == {"tokens_made": 5.0}


async def test_one_that_a_worker_refused_waits_again_and_says_so() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def decode(body: StartDecode) -> Messages:
            raise Overloaded("no room now")
            yield body

        on.d0.script = decode
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat("x")))
        await until(lambda: bool(on.d0.ended) and on.router.serving.num_waiting == 1)
        [request_id] = on.router.serving._runs
        page = (await client.get(f"/v1/requests/{request_id}")).json()
        assert (page["state"], page["moments_ms"]["placed"], page["durations_ms"]["queue"]) == ("queued", None, None)
        assert page["placements"][0]["decode"] == "d0"
        asked.cancel()
        await until(on.is_idle)
        turns = on.router.metrics.registry.get_sample_value("kvrelay_turns_given_back_total")
        assert turns == len(on.d0.started)


async def test_choices_are_told_though_others_of_them_are_forgotten() -> None:
    """The first may have ended long before the last."""
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        body = {"model": "fake", "prompt": ["one", "two", "three"], "max_tokens": 4}
        reply_id = (await client.post("/v1/completions", json=body)).json()["id"]
        await until(on.is_idle)
        del on.router.serving.recent._kept[f"{reply_id}-0"]
        page = (await client.get(f"/v1/requests/{reply_id}")).json()
        assert [choice["id"] for choice in page["choices"]] == [f"{reply_id}-1", f"{reply_id}-2"]
