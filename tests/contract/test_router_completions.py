"""POST /v1/completions as a client sees it, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from api_bodies import COMPLETIONS, Streamed, answer_ids, completion, ids_of, text_of
from scripted_worker import made, stage, until

from pd_core.errors import InvalidRequest
from pd_core.messages import TokenMade
from pd_core.request import FinishReason


async def test_the_whole_reply_is_openais_text_completion() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.post(COMPLETIONS, json=completion("one"))
        body = reply.json()
        assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
        assert (body["object"], body["model"]) == ("text_completion", "fake")
        assert body["id"].startswith("cmpl-")
        assert reply.headers["x-request-id"] == body["id"]
        text = text_of(answer_ids(ids_of("one"), 8))
        assert body["choices"] == [{"text": text, "index": 0, "logprobs": None, "finish_reason": "length"}]
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
        await until(on.is_idle)


async def test_the_stream_is_openais_too_and_says_the_same() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        whole = (await client.post(COMPLETIONS, json=completion("one"))).json()
        reply = await client.post(COMPLETIONS, json=completion("one", stream=True))
        streamed = Streamed(reply)
        assert streamed.is_done
        assert streamed.texts == {0: whole["choices"][0]["text"]}
        assert streamed.finishes == {0: ["length"]}
        assert streamed.usages == []
        for chunk in streamed.chunks:
            assert set(chunk) == {"id", "object", "created", "model", "choices"}
            assert chunk["object"] == "text_completion"
            [choice] = chunk["choices"]
            assert set(choice) == {"text", "index", "logprobs", "finish_reason"}
        assert len({chunk["id"] for chunk in streamed.chunks}) == 1


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
async def test_without_a_limit_sixteen_tokens_are_made_or_as_many_as_fit(given: dict[str, Any]) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        body = {"model": "fake", "prompt": "x" * 400, **given}
        assert (await client.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] == 16
        body["prompt"] = "x" * 507  # 512 positions
        assert (await client.post(COMPLETIONS, json=body)).json()["usage"]["completion_tokens"] == 5


async def test_every_form_of_a_prompt_reaches_the_workers_as_its_ids() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        for prompt, ids in [
            ("a b", [ids_of("a b")]),
            (["a", "bc"], [ids_of("a"), ids_of("bc")]),
            ([5, 96, 0], [[5, 96, 0]]),
            ([[1], [2, 3]], [[1], [2, 3]]),
            ("<|end|>", [[96]]),  # a special token's name is the token: who completes text may write turns himself
        ]:
            on.d0.started.clear()
            on.d0.ended.clear()
            body = (await client.post(COMPLETIONS, json=completion(prompt))).json()
            started = sorted((call.request for call in on.d0.started), key=lambda request: request.request_id)
            assert [request.tokens for request in started] == ids
            assert [choice["text"] for choice in body["choices"]] == [text_of(answer_ids(one, 8)) for one in ids]
            assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
            await until(on.is_idle)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_index_is_prompt_times_n_plus_k_and_usage_counts_each_prompt_once(is_stream: bool) -> None:
    """Known fault 21."""
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        asked = completion(["a", "bc"], n=3, return_token_ids=True, stream=is_stream)
        expected = [answer_ids(ids_of(prompt), 8) for prompt in ("a", "a", "a", "bc", "bc", "bc")]
        usage = {"prompt_tokens": 3, "completion_tokens": 48, "total_tokens": 51}
        if is_stream:
            streamed = Streamed(
                await client.post(COMPLETIONS, json=asked | {"stream_options": {"include_usage": True}})
            )
            assert streamed.token_ids == dict(enumerate(expected))
            assert streamed.finishes == {index: ["length"] for index in range(6)}
            assert streamed.usages == [usage]
            assert streamed.chunks[-1]["choices"] == []
            assert streamed.is_done
            said = {
                c["index"]: c["prompt_token_ids"]
                for chunk in streamed.chunks
                for c in chunk["choices"]
                if "prompt_token_ids" in c
            }
        else:
            body = (await client.post(COMPLETIONS, json=asked)).json()
            assert [choice["index"] for choice in body["choices"]] == list(range(6))
            assert [choice["token_ids"] for choice in body["choices"]] == expected
            assert body["usage"] == usage
            said = {choice["index"]: choice["prompt_token_ids"] for choice in body["choices"]}
        assert said == dict(enumerate([ids_of("a")] * 3 + [ids_of("bc")] * 3))
        await until(on.is_idle)


async def test_choices_of_a_stream_come_as_they_are_made_and_not_one_after_another() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        usual, gate = on.handoffs.decode, asyncio.Event()

        async def decode(body):
            async for message in usual(body):
                if isinstance(message, TokenMade) and message.index == 4:
                    await gate.wait()
                yield message

        on.d0.script = decode
        seen: set[str] = set()
        async with client.stream("POST", COMPLETIONS, json=completion(["a", "b"], stream=True)) as reply:
            async for line in reply.aiter_lines():
                seen |= {index for index in ('"index":0', '"index":1') if index in line}
                if len(seen) == 2:
                    gate.set()
        assert gate.is_set()


async def test_what_cannot_be_served_is_refused_by_the_name_of_its_field() -> None:
    refusals: list[tuple[dict[str, Any], int, str]] = [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [97]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": ["a", [1]]}, 400, "prompt"),
        ({"prompt": ["a"] * 65}, 400, "prompt"),
        ({"prompt": "x" * 512}, 400, "prompt"),
        ({"prompt": [1] * 512}, 400, "prompt"),
        ({"prompt": ["a", "x" * 600]}, 400, "prompt"),
        ({"prompt": "x" * 20_000}, 400, "prompt"),
        ({"prompt": "x" * 500, "max_tokens": 13}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"n": 65}, 400, "n"),
        ({"best_of": 2}, 400, "best_of"),
        ({"stop": ""}, 400, "stop"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"echo": True}, 400, "echo"),
        ({"logprobs": 2}, 400, "logprobs"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"surprise": 1}, 400, "surprise"),
        ({"model": "gpt-4o"}, 404, "model"),
    ]
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        for fields, status, param in refusals:
            for is_stream in (False, True):
                reply = await client.post(COMPLETIONS, json=completion() | fields | {"stream": is_stream})
                assert reply.status_code == status
                error = reply.json()["error"]
                assert (set(error), error["param"]) == ({"message", "type", "param", "code"}, param)
                assert reply.headers["x-request-id"].startswith("cmpl-")
        assert on.d0.started == on.p0.started == []


async def test_one_prompt_that_can_never_fit_has_all_of_them_refused_before_any_is_begun() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.post(COMPLETIONS, json=completion([[1], [1] * 600, [2]], n=2))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert on.router.serving.num_running == 0
        assert len(on.router.serving.recent) == 0


async def test_a_field_that_a_worker_does_not_like_has_the_name_that_the_client_knows() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def decode(body):
            raise InvalidRequest("decode does not like it", param="messages")
            yield made(body.request, 0)

        on.d0.script = decode
        error = (await client.post(COMPLETIONS, json=completion())).json()["error"]
        assert (error["message"], error["param"]) == ("decode does not like it", "prompt")


async def test_the_end_token_counts_and_has_no_text_unless_it_is_ignored() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def prefill(body):
            yield TokenMade(0, 96, FinishReason.STOP)

        on.p0.script = prefill
        body = (await client.post(COMPLETIONS, json=completion())).json()
        assert body["choices"] == [{"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}]
        assert body["usage"]["completion_tokens"] == 1
        streamed = Streamed(await client.post(COMPLETIONS, json=completion(stream=True)))
        assert (streamed.texts, streamed.finishes, streamed.is_done) == ({0: ""}, {0: ["stop"]}, True)
        assert on.p0.started[-1].request.stop_token_ids == [96]
        on.p0.script = on.handoffs.prefill
        await client.post(COMPLETIONS, json=completion(ignore_eos=True))
        assert on.p0.started[-1].request.stop_token_ids == []


async def test_the_official_client_reads_both_forms() -> None:
    async with stage() as on:
        client = openai.AsyncOpenAI(base_url=f"{on.url}/v1", api_key="none", max_retries=0)
        whole = await client.completions.create(
            model="fake", prompt=["a", "b"], n=2, max_tokens=5, stop=["~~"], user="me"
        )
        texts = [text_of(answer_ids(ids_of(prompt), 5)) for prompt in ("a", "a", "b", "b")]
        assert [choice.text for choice in whole.choices] == texts
        stream = await client.completions.create(
            model="fake", prompt=["a", "b"], n=2, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        streamed = [""] * 4
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
            last = chunk
        assert streamed == texts
        assert last.usage == whole.usage
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(model="fake", prompt="x", echo=True)
        assert refusal.value.param == "echo"
        await client.close()
