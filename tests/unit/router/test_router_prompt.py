"""How prompts are read: what certainly does not fit is refused first, and few long ones are tokenised at once."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from pd_core.errors import Cancelled, ContextLengthExceeded, Overloaded
from pd_model.assets import ModelAssets, load_assets
from pd_model.fake import fake_model
from pd_model.folder import default_cache_dir
from pd_model.tokenizer import GUARD
from router.prompt import LONG_CHARACTERS, MAX_AT_ONCE, MESSAGE_CHARACTERS, PromptReader, unless_left

LONG = [{"role": "user", "content": "x" * LONG_CHARACTERS}]
SHORT = [{"role": "user", "content": "x"}]


class SlowTokenizer:
    """Gives one id, once `gate` is open. num_running: calls that have begun and not ended."""

    text_prefix = ()

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.num_running = 0

    def least_tokens(self, text: str) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        self.num_running += 1
        assert self.gate.wait(5)
        self.num_running -= 1
        return [7]


def with_tokenizer(tokenizer: Any) -> ModelAssets:
    return replace(fake_model(), tokenizer=tokenizer)


async def until_running(tokenizer: SlowTokenizer, num: int) -> None:
    async with asyncio.timeout(2):
        while tokenizer.num_running != num:
            await asyncio.sleep(0.001)


async def test_four_megabytes_are_refused_in_a_moment() -> None:
    reader = PromptReader(load_assets(None, default_cache_dir()), max_waiting=1)
    began_s = time.monotonic()
    with pytest.raises(ContextLengthExceeded, match="at least") as refusal:
        await reader.read_chat([{"role": "user", "content": "hello world " * 350_000}], max_tokens=8192)
    assert time.monotonic() - began_s < 0.5
    assert (refusal.value.param, refusal.value.code) == ("messages", "context_length_exceeded")


async def test_what_is_measured_is_the_templates_text() -> None:
    """A template may leave a message out: the long one does not count then."""
    real = load_assets(None, default_cache_dir())
    template = type(real.chat_template)("{{ messages[-1]['content'] }}", [], {})
    reader = PromptReader(replace(real, chat_template=template), max_waiting=1)
    tokens = await reader.read_chat([{"role": "user", "content": "x" * 4_000_000}, *SHORT], max_tokens=8192)
    assert tokens == real.tokenizer.encode("x")


async def test_a_few_long_prompts_are_read_at_once_some_wait_and_more_are_refused() -> None:
    tokenizer = SlowTokenizer()
    reader = PromptReader(with_tokenizer(tokenizer), max_waiting=3)
    reading = [asyncio.create_task(reader.read_chat(LONG, 10_000)) for _ in range(MAX_AT_ONCE + 3)]
    await until_running(tokenizer, MAX_AT_ONCE)
    with pytest.raises(Overloaded) as refusal:
        await reader.read_chat(LONG, 10_000)
    assert refusal.value.retry_after_s == 1.0
    tokenizer.gate.set()
    assert await asyncio.gather(*reading) == [[7]] * (MAX_AT_ONCE + 3)
    assert await reader.read_chat(LONG, 10_000) == [7]


async def test_a_client_that_leaves_frees_its_turn_only_when_the_tokenisation_has_ended() -> None:
    tokenizer = SlowTokenizer()
    reader = PromptReader(with_tokenizer(tokenizer), max_waiting=1)
    departure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reading = [asyncio.create_task(unless_left(reader.read_chat(LONG, 10_000), departure)) for _ in range(MAX_AT_ONCE)]
    await until_running(tokenizer, MAX_AT_ONCE)
    departure.set_result(None)
    later = asyncio.create_task(reader.read_chat(LONG, 10_000))
    for _ in range(20):
        await asyncio.sleep(0)
    assert tokenizer.num_running == MAX_AT_ONCE
    tokenizer.gate.set()
    for task in reading:
        with pytest.raises(Cancelled):
            await task
    assert await later == [7]


async def test_a_client_that_leaves_the_wait_is_gone_at_once() -> None:
    tokenizer = SlowTokenizer()
    reader = PromptReader(with_tokenizer(tokenizer), max_waiting=1)
    reading = [asyncio.create_task(reader.read_chat(LONG, 10_000)) for _ in range(MAX_AT_ONCE)]
    await until_running(tokenizer, MAX_AT_ONCE)
    departure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(unless_left(reader.read_chat(LONG, 10_000), departure))
    await asyncio.sleep(0)
    departure.set_result(None)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(waiting, 1)
    tokenizer.gate.set()
    assert await asyncio.gather(*reading) == [[7]] * MAX_AT_ONCE


class PlainTokenizer:
    """A token for each character; texts begin with token 1."""

    text_prefix = (1,)

    def least_tokens(self, text: str) -> int:
        return len(text)

    def encode(self, text: str) -> list[int]:
        return [1 if character == "^" else ord(character) for character in text]


async def test_texts_begin_as_the_models_texts_do_and_only_once() -> None:
    reader = PromptReader(with_tokenizer(PlainTokenizer()), max_waiting=1)
    assert await reader.read_texts(["a", "^a", ""], max_tokens=10) == [[1, 97], [1, 97], [1]]
    with pytest.raises(ContextLengthExceeded):
        await reader.read_texts(["a", "a" * 11], max_tokens=10)


async def test_many_texts_are_as_long_as_all_of_them_together() -> None:
    tokenizer = SlowTokenizer()
    reader = PromptReader(with_tokenizer(tokenizer), max_waiting=0)
    texts = ["x" * (LONG_CHARACTERS // 4)] * 4
    reading = [asyncio.create_task(reader.read_texts(texts, 10_000)) for _ in range(MAX_AT_ONCE)]
    await until_running(tokenizer, MAX_AT_ONCE)
    with pytest.raises(Overloaded):
        await reader.read_texts(texts, 10_000)
    tokenizer.gate.set()
    assert await asyncio.gather(*reading) == [[[7]] * 4] * MAX_AT_ONCE


async def test_many_messages_without_text_are_long_too() -> None:
    """The template takes its time for each of them."""
    tokenizer = SlowTokenizer()
    reader = PromptReader(with_tokenizer(tokenizer), max_waiting=0)
    messages = [{"role": "user", "content": ""}] * (LONG_CHARACTERS // MESSAGE_CHARACTERS)
    reading = [asyncio.create_task(reader.read_chat(messages, 10_000)) for _ in range(MAX_AT_ONCE)]
    await until_running(tokenizer, MAX_AT_ONCE)
    with pytest.raises(Overloaded):
        await reader.read_chat(messages, 10_000)
    tokenizer.gate.set()
    assert await asyncio.gather(*reading) == [[7]] * MAX_AT_ONCE


async def test_no_character_of_a_text_is_dropped_in_silence() -> None:
    """The tokenizer cuts at GUARD and leaves it out; in a client's text it is read as in a client's message."""
    reader = PromptReader(with_tokenizer(PlainTokenizer()), max_waiting=1)
    assert await reader.read_texts([f"a{GUARD}b"], max_tokens=10) == [[1, 97, 0xFFFD, 98]]
