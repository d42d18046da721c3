"""The answer as a client sees it, over real sockets: whole and in pieces, with exact usage."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from scripted_worker import chat, expected_text, num_prompt_tokens, stage, until

from pd_core.config import RouterConfig
from pd_core.messages import StartDecode, TokenMade
from pd_core.request import FinishReason

NUM_STALLED = 3


def events_of(body: str) -> list[str]:
    assert body.endswith("\n\n")
    return [event.removeprefix("data: ") for event in body.removesuffix("\n\n").split("\n\n")]


async def test_the_whole_reply_has_the_text_and_exact_usage() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.post("/v1/chat/completions", json=chat("one"))
        body = reply.json()
        assert reply.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["choices"][0]["message"]["content"] == expected_text("one", 8)
        assert body["choices"][0]["finish_reason"] == "length"
        num_prompt = num_prompt_tokens("one")
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": 8,
            "total_tokens": num_prompt + 8,
        }
        await until(on.is_idle)


async def test_a_stream_begins_with_the_role_and_ends_with_its_reason_usage_and_done() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        body = chat("one", stream=True, stream_options={"include_usage": True})
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, done = events_of(reply.text)
        assert done == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert len({chunk["id"] for chunk in chunks}) == 1
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        assert text == expected_text("one", 8)
        reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 8


async def test_token_ids_are_told_in_both_forms_when_they_are_asked_for() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        whole = (await client.post("/v1/chat/completions", json=chat("one", return_token_ids=True))).json()
        ids = whole["choices"][0]["token_ids"]
        assert len(ids) == whole["usage"]["completion_tokens"]
        assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]

        reply = await client.post("/v1/chat/completions", json=chat("one", return_token_ids=True, stream=True))
        chunks = [json.loads(event) for event in events_of(reply.text)[:-1]]
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert [token for c in chunks for token in c["choices"][0].get("token_ids", [])] == ids

        plain = (await client.post("/v1/chat/completions", json=chat("one"))).json()
        assert "prompt_token_ids" not in plain
        assert "token_ids" not in plain["choices"][0]


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_usage_is_not_streamed_unless_it_is_asked_for(options: dict[str, object]) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.post("/v1/chat/completions", json=chat("one", stream=True, **options))
        *events, done = events_of(reply.text)
        assert done == "[DONE]"
        assert all("usage" not in json.loads(event) for event in events)


async def test_the_official_client_reads_both_forms() -> None:
    async with stage() as on:
        client = openai.AsyncOpenAI(base_url=f"{on.url}/v1", api_key="none", max_retries=0)
        message = {"role": "user", "content": [{"type": "text", "text": "tw"}, {"type": "text", "text": "o"}]}
        whole = await client.chat.completions.create(model="fake", messages=[message], max_completion_tokens=5)
        stream = await client.chat.completions.create(
            model="fake", messages=[message], max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert whole.choices[0].message.content == expected_text("two", 5)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert [model.id async for model in client.models.list()] == ["fake"]
        await client.close()


async def test_a_token_that_ends_the_text_counts_but_has_no_text() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def prefill(body):
            yield TokenMade(0, 96, FinishReason.STOP)

        on.p0.script = prefill
        body = (await client.post("/v1/chat/completions", json=chat("x"))).json()
        assert body["choices"][0] | {"logprobs": None} == {
            "index": 0,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert body["usage"]["completion_tokens"] == 1
        await until(on.is_idle)
        assert on.d0.cancelled  # the ticket is not needed any more
        assert not on.p0.cancelled


async def test_what_the_client_asks_for_is_what_the_workers_get() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        asked = chat("x", temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-1, user="me", store=False)
        assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
        first = on.d0.started[-1].request
        assert (first.sampling.temperature, first.sampling.top_p, first.sampling.min_p) == (0.5, 0.9, 0.1)
        assert (first.sampling.top_k, first.sampling.seed) == (0, 2**63 - 1)
        assert first.stop_token_ids == [96]
        assert first == on.p0.started[-1].request
        for _ in range(2):
            assert (await client.post("/v1/chat/completions", json=chat("x", ignore_eos=True))).status_code == 200
        second, third = (body.request for body in on.d0.started[-2:])
        assert second.stop_token_ids == []
        assert second.sampling.temperature == 1.0
        assert second.sampling.seed != third.sampling.seed


async def test_max_tokens_null_is_what_is_left_and_one_token_when_only_one_is() -> None:
    """Known fault 4: N is 512 here, the context; pools hold 1024 tokens."""
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        overhead = num_prompt_tokens("")
        for num_left in (1, 2, 17):
            body = chat("x" * (512 - overhead - num_left), max_tokens=None)
            reply = (await client.post("/v1/chat/completions", json=body)).json()
            assert reply["usage"]["completion_tokens"] == num_left
            assert reply["choices"][0]["finish_reason"] == "length"


async def test_two_requests_of_one_client_id_are_two_requests() -> None:
    """Known fault 12: the client's id is said back and logged, never a key."""
    async with stage(num_prefill=2) as on, httpx.AsyncClient(base_url=on.url) as client:
        usual, hold = on.handoffs.decode, asyncio.Event()

        async def slow(body: StartDecode):
            async for message in usual(body):
                if getattr(message, "index", 0) == 3:
                    await hold.wait()
                yield message

        on.d0.script = slow
        headers = {"x-request-id": "same"}
        send = [
            asyncio.create_task(client.post("/v1/chat/completions", json=chat(text, max_tokens=50), headers=headers))
            for text in ("first", "second")
        ]
        await until(lambda: len(on.d0.started) == 2)
        ids = {body.request.request_id for body in on.d0.started}
        assert len(ids) == 2
        assert "same" not in ids
        send[0].cancel()
        await until(lambda: len(on.d0.ended) == 1)
        hold.set()
        reply = await send[1]
        assert reply.json()["choices"][0]["message"]["content"] == expected_text("second", 50)
        assert reply.headers["x-request-id"] == "same"
        assert reply.json()["id"] != "same"
        assert len(on.d0.cancelled) == 1


async def test_sixteen_requests_at_once_spread_over_two_prefill_workers() -> None:
    """Known fault 13."""
    async with stage(num_prefill=2, num_decode=2) as on, httpx.AsyncClient(base_url=on.url) as client:
        bodies = [chat(f"prompt {i}") for i in range(16)]
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
        assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == [
            expected_text(f"prompt {i}", 8) for i in range(16)
        ]
        assert all(6 <= len(worker.started) <= 10 for worker in on.workers)


async def test_a_client_that_reads_slowly_loses_nothing() -> None:
    def prepare(on):
        for worker in on.workers:
            worker.context_tokens, worker.num_blocks, worker.num_free = 8192, 512, 512

    async with stage(prepare=prepare) as on:
        reader, writer = await asyncio.open_connection(*on.url.removeprefix("http://").split(":"), limit=4096)
        body = json.dumps(chat("slow", max_tokens=6000, stream=True)).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(on.is_idle, within_s=10)  # all tokens are made, hardly any is read
        text = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            for line in (await reader.read(-1)).decode().splitlines()
            if line.startswith("data: {")
        )
        assert text == expected_text("slow", 6000)
        writer.close()


def ours_in_memory() -> dict[str, int]:
    """Traced bytes, by the file that took them."""
    ours = [tracemalloc.Filter(True, f"*/{part}/*") for part in ("router", "uvicorn", "asyncio")]
    found = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
    return {one.traceback[0].filename: one.size for one in found}


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_what_is_kept_for_clients_that_do_not_read_is_bounded(num_choices: int) -> None:
    """Known fault 32: less than 64 KiB for each, of what workers made, choices brought and connections hold."""

    def prepare(on):
        for worker in on.workers:
            worker.context_tokens, worker.num_blocks, worker.num_free = 8192, 8192, 8192

    async with stage(prepare=prepare) as on:
        body = json.dumps(chat("x", max_tokens=4000 // num_choices, stream=True, n=num_choices)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
        url, loop, clients = urlsplit(on.url), asyncio.get_running_loop(), []
        tracemalloc.start()
        try:
            async with httpx.AsyncClient(base_url=on.url) as reading:  # what is kept in any case
                assert (await reading.post("/v1/chat/completions", content=body)).status_code == 200
            before = ours_in_memory()
            for _ in range(NUM_STALLED):
                client = socket.socket()
                clients.append(client)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, (url.hostname, url.port))
                await loop.sock_sendall(client, head + body)
            await until(lambda: len(on.d0.ended) == (1 + NUM_STALLED) * num_choices, within_s=40)
            await until(on.is_idle)
            kept = {name: size - before.get(name, 0) for name, size in ours_in_memory().items()}
        finally:
            tracemalloc.stop()
            for client in clients:
                client.close()
        assert sum(kept.values()) / NUM_STALLED < 64 << 10, kept


async def test_a_client_that_does_not_read_at_all_is_cut_off() -> None:
    def prepare(on):
        for worker in on.workers:
            worker.context_tokens, worker.num_blocks, worker.num_free = 1 << 20, 1 << 16, 1 << 16

    async with stage(prepare=prepare, stall_s=0.3) as on:
        reader, writer = await asyncio.open_connection(*on.url.removeprefix("http://").split(":"), limit=4096)
        body = json.dumps(chat("slow", max_tokens=1_000_000, stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await until(lambda: len(on.d0.cancelled) == 1, within_s=10)
        await until(on.is_idle)
        assert b"[DONE]" not in await reader.read(-1)
        writer.close()


async def test_the_log_line_of_a_request_has_its_ids_counts_and_times(caplog: pytest.LogCaptureFixture) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        with caplog.at_level("INFO", logger="router.access"):
            await client.post("/v1/chat/completions", json=chat("x"), headers={"x-request-id": "mine"})
            await client.post("/v1/chat/completions", json=chat("x", logprobs=True))
        good, bad = [vars(record) for record in caplog.records if record.name == "router.access"]
        assert (good["status"], good["num_tokens"], good["num_prompt"]) == (200, 8, num_prompt_tokens("x"))
        assert good["client_request_id"] == "mine"
        assert good["request_id"].startswith("chatcmpl-")
        assert (good["prefill"], good["decode"], good["path"], good["num_kv_bytes"]) == ("p0", "d0", "tcp", 4096)
        moments = [
            good[f"{step}_ms"] for step in ("queued", "placed", "reserved", "first_token", "last_token", "ended")
        ]
        assert moments == sorted(moments)
        assert good["ttft_ms"] == good["first_token_ms"]
        assert (bad["status"], bad["error"]) == (400, "invalid_value")
        assert [timeline.outcome for timeline in on.router.serving.recent] == ["finished"]


async def test_with_a_queue_of_length_zero_a_request_still_gets_a_free_place() -> None:
    async with stage(RouterConfig(max_queue=0)) as on, httpx.AsyncClient(base_url=on.url) as client:
        assert (await client.post("/v1/chat/completions", json=chat("x"))).status_code == 200
