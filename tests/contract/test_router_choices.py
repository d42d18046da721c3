"""Several choices of one request, and stop strings: on the workers, and as the client sees them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from api_bodies import CHAT, COMPLETIONS, Streamed, answer_ids, chat_ids, completion, ids_of, text_of
from scripted_worker import COMMITTED, chat, granted, made, stage, until

from pd_core.config import RouterConfig
from pd_core.errors import EngineError
from pd_core.messages import StartDecode, TokenMade
from router.choices import choice_seed


def test_the_first_choice_has_the_requests_own_seed_and_the_others_fixed_ones() -> None:
    assert [choice_seed(7, choice) for choice in range(4)] == [
        7,
        4268606368891498066,
        4763576614149403047,
        6440627658329496515,
    ]
    seeds = {choice_seed(seed, choice) for seed in (0, 1, 2**63 - 1) for choice in range(64)}
    assert len(seeds) == 3 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_each_choice_is_a_request_of_its_own_with_its_own_draws() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        body = (await client.post(CHAT, json=chat("x", n=3, seed=7))).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in body["choices"]} == {text_of(answer_ids(chat_ids("x"), 8))}
        assert body["usage"]["prompt_tokens"] == len(chat_ids("x"))
        assert body["usage"]["completion_tokens"] == 24
        requests = sorted((call.request for call in on.d0.started), key=lambda request: request.request_id)
        assert [request.request_id for request in requests] == [f"{body['id']}-{number}" for number in range(3)]
        assert [request.sampling.seed for request in requests] == [choice_seed(7, choice) for choice in range(3)]
        alone = (await client.post(CHAT, json=chat("x", seed=7))).json()
        assert (on.d0.started[-1].request.request_id, on.d0.started[-1].request.sampling.seed) == (alone["id"], 7)


async def test_without_a_seed_every_prompt_draws_on_its_own() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        await client.post(COMPLETIONS, json=completion(["x", "x"], n=2))
        assert len({call.request.sampling.seed for call in on.d0.started}) == 4
        on.d0.started.clear()
        on.d0.ended.clear()
        await client.post(COMPLETIONS, json=completion(["x", "x"], n=2, seed=5))
        assert len({call.request.sampling.seed for call in on.d0.started}) == 2  # each as if it were alone


async def test_a_chat_of_several_choices_streams_a_role_and_a_reason_for_each_and_one_usage() -> None:
    """Known fault 21."""
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        asked = chat("x", n=3, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        streamed = Streamed(await client.post(CHAT, json=asked))
        ids = answer_ids(chat_ids("x"), 8)
        assert streamed.token_ids == dict.fromkeys(range(3), ids)
        assert streamed.finishes == {index: ["length"] for index in range(3)}
        roles = [
            chunk["choices"][0]["index"] for chunk in streamed.chunks[:-1] if "role" in chunk["choices"][0]["delta"]
        ]
        assert sorted(roles) == [0, 1, 2]
        assert [usage["completion_tokens"] for usage in streamed.usages] == [24]
        assert streamed.chunks[-1]["choices"] == []
        assert streamed.is_done
        await until(on.is_idle)


async def test_a_request_whose_choices_do_not_all_find_room_is_refused_whole() -> None:
    async with stage(RouterConfig(max_queue=2)) as on, httpx.AsyncClient(base_url=on.url) as client:

        async def hang(body: Any) -> AsyncIterator[msgspec.Struct]:
            await asyncio.sleep(3600)
            yield body

        on.d0.script = hang
        reply = await client.post(CHAT, json=chat("x", n=64))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        await until(on.is_idle, within_s=1.0)
        assert list(on.router.serving.recent) == []  # as for one that is refused alone
        assert "kvrelay_request_outcomes_total{" not in (await client.get("/metrics")).text
        assert on.d0.started == []
        on.d0.script = on.handoffs.decode
        assert (await client.post(CHAT, json=chat("x"))).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_when_one_choice_fails_the_others_are_ended_and_the_client_is_told(is_stream: bool) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def decode(body: StartDecode) -> AsyncIterator[msgspec.Struct]:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
            yield COMMITTED
            for index in range(3):
                yield made(body.request, index)
            if body.request.request_id.endswith("-1"):
                await asyncio.sleep(0.1)
                raise EngineError("decode broke")
            await asyncio.sleep(3600)

        on.d0.script = decode
        reply = await client.post(CHAT, json=chat("x", n=3, stream=is_stream))
        if is_stream:
            streamed = Streamed(reply)
            assert streamed.error is not None
            assert streamed.error["message"] == "decode broke"
            assert not streamed.is_done
        else:
            assert (reply.status_code, reply.json()["error"]["message"]) == (500, "decode broke")
        await until(on.is_idle, within_s=1.0)
        outcomes = sorted(timeline.outcome or "" for timeline in on.router.serving.recent)
        assert outcomes == ["cancelled", "cancelled", "failed"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_when_the_client_leaves_all_its_choices_are_cancelled_within_a_second(is_stream: bool) -> None:
    """Known fault 6, with n = 3 and two prompts."""
    async with stage() as on:

        async def decode(body: StartDecode) -> AsyncIterator[msgspec.Struct]:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
            yield COMMITTED
            for index in range(3):
                yield made(body.request, index)
            await asyncio.sleep(3600)

        on.d0.script = decode
        _, writer = await asyncio.open_connection(*on.url.removeprefix("http://").split(":"))
        body = json.dumps(completion(["a", "b"], n=3, stream=is_stream, max_tokens=200)).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await until(lambda: len(on.d0.started) == 6)
        writer.transport.abort()
        await until(on.is_idle, within_s=1.0)
        assert [timeline.outcome for timeline in on.router.serving.recent] == ["cancelled"] * 6


async def test_one_line_of_the_log_has_the_sums_and_each_choice_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        with caplog.at_level("INFO", logger="router.access"):
            body = (await client.post(CHAT, json=chat("x", n=3))).json()
        *choices, line = [vars(record) for record in caplog.records if record.name == "router.access"]
        assert (line["request_id"], line["num_choices"], line["num_tokens"]) == (body["id"], 3, 24)
        assert line["ttft_ms"] > 0
        assert [choice["request_id"] for choice in choices] == [f"{body['id']}-{number}" for number in range(3)]
        assert {choice["of_request_id"] for choice in choices} == {body["id"]}


# Stop strings


async def ask(client: httpx.AsyncClient, prompt: str, stop: Any, num_tokens: int) -> tuple[str, str, int]:
    """Text, reason and completion tokens, which must be the same streamed and whole, in both APIs."""
    told = []
    for path, body in ((COMPLETIONS, completion(prompt)), (CHAT, chat(prompt))):
        asked = body | {"stop": stop, "max_tokens": num_tokens}
        whole = (await client.post(path, json=asked)).json()
        choice = whole["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = Streamed(await client.post(path, json=asked | options))
        assert streamed.is_done
        assert (streamed.texts, streamed.finishes) == ({0: text}, {0: [choice["finish_reason"]]})
        assert streamed.usages == [whole["usage"]]
        told.append((text, choice["finish_reason"], whole["usage"]["completion_tokens"]))
    # The fake's chat template makes another text of the same words; completions tell what is compared.
    return told[0]


async def test_a_text_is_cut_before_the_first_stop_wherever_it_lies() -> None:
    """Known fault 19: stop = T[i:j], and stops that begin and do not go on."""
    chance = random.Random(3)
    async with stage() as on, httpx.AsyncClient(base_url=on.url, timeout=20) as client:
        full = text_of(answer_ids(ids_of("hello"), 40))
        for _ in range(25):
            begin = chance.randrange(39)
            stop = full[begin : chance.randrange(begin + 1, 41)]
            text, reason, num_tokens = await ask(client, "hello", stop, 40)
            assert (text, reason, num_tokens) == (full[:begin], "stop", begin + len(stop))
        text, reason, num_tokens = await ask(client, "hello", [full[5:9] + "\n", full[38:] + "more"], 40)
        assert (text, reason, num_tokens) == (full, "length", 40)
        await until(on.is_idle)


async def test_a_stop_ends_the_work_at_once_and_counts_as_a_good_end() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        full = text_of(answer_ids(ids_of("hello"), 200))
        began_more = asyncio.Event()

        async def decode(body: StartDecode) -> AsyncIterator[msgspec.Struct]:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
            yield COMMITTED
            for index in range(10):
                yield made(body.request, index)
            began_more.set()
            await asyncio.sleep(3600)  # nothing more comes: only the stop can end this

        on.d0.script = decode
        for is_stream in (False, True):
            asked = completion("hello", stop=full[6:10], max_tokens=200, stream=is_stream)
            reply = await asyncio.wait_for(client.post(COMPLETIONS, json=asked), 2)
            text = Streamed(reply).texts[0] if is_stream else reply.json()["choices"][0]["text"]
            assert text == full[:6]
        await until(on.is_idle, within_s=1.0)
        assert len(on.d0.cancelled) == 2
        assert [timeline.outcome for timeline in on.router.serving.recent] == ["finished"] * 2


async def test_with_a_stop_in_one_choice_the_others_go_on() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        first, second = (text_of(answer_ids(ids_of(prompt), 30)) for prompt in ("a", "zzz"))
        stop = first[10:13]
        assert stop not in second
        body = (await client.post(COMPLETIONS, json=completion(["a", "zzz"], stop=stop, max_tokens=30))).json()
        assert [choice["text"] for choice in body["choices"]] == [first[:10], second]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
        assert body["usage"]["completion_tokens"] == 13 + 30
        await until(on.is_idle)


async def test_the_first_token_is_told_at_once_though_its_text_is_held_back() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()

        async def decode(body: StartDecode) -> AsyncIterator[msgspec.Struct]:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
            yield COMMITTED
            yield made(body.request, 0)
            await gate.wait()
            for index in range(1, body.request.max_tokens):
                yield made(body.request, index)

        on.d0.script = decode
        full = text_of(answer_ids(ids_of("hello"), 8))
        asked = completion("hello", stop=full[0] + "never", stream=True)
        async with client.stream("POST", COMPLETIONS, json=asked) as reply:
            lines = reply.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["choices"][0]["text"] == ""
            gate.set()
            rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in rest) == full


async def test_a_stop_that_the_first_token_completes_leaves_nothing_on_either_worker() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        full = text_of(answer_ids(ids_of("hello"), 8))

        async def prefill(body: Any) -> AsyncIterator[msgspec.Struct]:
            yield TokenMade(0, answer_ids(body.request.tokens, 1)[0])
            await asyncio.sleep(3600)

        on.p0.script = prefill
        body = (await client.post(COMPLETIONS, json=completion("hello", stop=full[0]))).json()
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "stop")
        assert body["usage"]["completion_tokens"] == 1
        await until(on.is_idle)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_totals_of_tokens_are_the_sums_of_usage(is_stream: bool) -> None:
    """Known fault 29: a prompt counts once however many choices it has, and what was made behind a stop never does."""
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        ids = answer_ids(ids_of("one"), 40)
        more = {"stream_options": {"include_usage": True}} if is_stream else {}
        asked = completion(["one", "two"], n=2, max_tokens=40, stop=text_of(ids[3:5]), stream=is_stream, **more)
        reply = await client.post(COMPLETIONS, json=asked)
        [usage] = Streamed(reply).usages if is_stream else [reply.json()["usage"]]
        assert usage["prompt_tokens"] == 6
        assert usage["completion_tokens"] == 2 * 5 + 2 * 40
        await until(on.is_idle)
        lines = (await client.get("/metrics")).text.splitlines()
        assert "kvrelay_prompt_tokens_total 6.0" in lines
        assert "kvrelay_generated_tokens_total 90.0" in lines
        assert "kvrelay_itl_seconds_count 86.0" in lines
        assert sorted(timeline.num_tokens for timeline in on.router.serving.recent) == [5, 5, 40, 40]
