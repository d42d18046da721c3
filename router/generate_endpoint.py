"""A POST that generates text, from bytes to bytes. What its API has of its own is in chat_api.py, completion_api.py."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from pd_core.config import RouterConfig
from pd_core.errors import KvrelayError
from pd_core.request import FinishReason, GenerateRequest
from pd_model.model_assets import ModelAssets
from pd_rpc.tasks import BackgroundTasks
from router.answer_text import AnswerText
from router.api_fields import NUM_SEEDS, Options
from router.choices import Choices, choice_seed, open_choices
from router.exchange import Exchange
from router.http_reply import Receive, Scope, Send, read_body, wait_for_disconnect
from router.prompt import unless_left
from router.reply_parts import Answer, ReplyHead, usage_of
from router.serving import Serving
from router.unread import TokenEvent

logger = logging.getLogger(__name__)

PROMPT_INSIDE = "messages"
"""What router and workers call the prompt in `param`, whatever field it came in."""


class Call(Protocol):
    """A request that can be meant."""

    @property
    def options(self) -> Options: ...


class Events(Protocol):
    """Writes the events of one stream; see EventWriter."""

    def first(
        self, choice: int, text: str, token_ids: Sequence[int] | None, prompt_ids: Sequence[int] | None
    ) -> bytes: ...

    def text(self, choice: int, text: str, token_ids: Sequence[int] | None) -> bytes: ...

    def finish(self, choice: int, reason: FinishReason) -> bytes: ...

    def end(self, usage: dict[str, int]) -> bytes: ...


AnyCall = TypeVar("AnyCall", bound=Call)


class Api(Protocol[AnyCall]):
    """What one endpoint has of its own: its fields, its prompts, the shapes of its replies.

    name:               in the log
    id_prefix:          of a reply's id
    prompt_field:       what a prompt that is at fault is called
    default_max_tokens: at most so many when the client does not say; None is as many as fit
    """

    name: str
    id_prefix: str
    prompt_field: str
    default_max_tokens: int | None

    def parse(self, body: bytes) -> AnyCall:
        """Raises InvalidRequest naming the field, or UnknownModel."""
        ...

    async def read_prompts(self, call: AnyCall, max_tokens: int) -> Sequence[list[int]]:
        """The ids of each prompt; one of more than `max_tokens` may be refused."""
        ...

    def whole(
        self,
        head: ReplyHead,
        answers: Sequence[Answer],
        usage: dict[str, int],
        prompt_ids: Sequence[Sequence[int]] | None,
    ) -> bytes:
        """A reply that is not streamed. prompt_ids: of each answer's prompt, where the client asked for them"""
        ...

    def events(self, head: ReplyHead, num_choices: int, *, is_usage_asked: bool) -> Events: ...


class ReplyObserver(Protocol):
    """Who counts replies."""

    def replied(self, status: int) -> None:
        """A request has ended."""
        ...

    def prompt_answered(self, num_tokens: int) -> None:
        """A prompt's first choice has its first token."""
        ...


class _Work(msgspec.Struct):
    """What is done for one exchange. prompts: of each choice"""

    options: Options
    prompts: list[list[int]]
    num_prompt: int
    choices: Choices
    answers: list[AnswerText]
    head: ReplyHead
    observer: ReplyObserver

    @property
    def usage(self) -> dict[str, int]:
        return usage_of(self.num_prompt, sum(len(answer.token_ids) for answer in self.answers))

    def add(self, index: int, events: Sequence[TokenEvent]) -> str:
        """The text that is final now; the work ends when it is complete. What counts is what `usage` counts."""
        answer = self.answers[index]
        num_before = len(answer.token_ids)
        text = answer.add(events)
        self.choices.runs[index].given(events[: len(answer.token_ids) - num_before])
        if num_before == 0 and index % self.options.num_choices == 0:
            self.observer.prompt_answered(len(self.prompts[index]))
        if answer.finish is not None:
            self.choices.complete(index)
        return text


class GenerateEndpoint(Generic[AnyCall]):
    """An ASGI application for one route."""

    def __init__(
        self,
        api: Api[AnyCall],
        serving: Serving,
        assets: ModelAssets,
        config: RouterConfig,
        clock: Callable[[], float],
        observer: ReplyObserver,
    ) -> None:
        self._api = api
        self._serving = serving
        self._assets = assets
        self._max_body_bytes = config.max_body_bytes
        self._watchers = BackgroundTasks()
        self._clock = clock
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = self._api
        exchange = Exchange(scope, send, name=api.name, id_prefix=api.id_prefix, arrived_s=self._clock())
        try:
            await self._answer(exchange, receive)
        except KvrelayError as error:
            if error.param == PROMPT_INSIDE:
                error.param = api.prompt_field
            await exchange.fail(error)
        except Exception:
            logger.exception("a %s request failed", api.name, extra={"request_id": exchange.request_id})
            await exchange.fail(KvrelayError("internal error in the router; see its log"))
        finally:
            self._observer.replied(exchange.status)
            exchange.log(self._clock())

    async def _answer(self, exchange: Exchange, receive: Receive) -> None:
        body = await read_body(exchange.scope, receive, self._max_body_bytes)
        call = self._api.parse(body)
        max_tokens = self._serving.check_open()  # what is refused anyway is not worth tokenising
        departure = self._watchers.start(wait_for_disconnect(receive), f"{exchange.request_id}:departure")
        try:
            prompts = await unless_left(self._api.read_prompts(call, max_tokens), departure)
            await self._serve(exchange, call.options, prompts, departure)
        finally:
            departure.cancel()

    async def _serve(
        self, exchange: Exchange, options: Options, prompts: Sequence[list[int]], departure: asyncio.Task[None]
    ) -> None:
        requests = self._requests(exchange.request_id, options, prompts)
        choices = open_choices(self._serving, requests, exchange.arrived_s)
        exchange.runs = choices.runs
        departure.add_done_callback(lambda _: choices.leave())
        work = _Work(
            options,
            [request.tokens for request in requests],
            sum(map(len, prompts)),
            choices,
            [AnswerText(self._assets.tokenizer, options.stops) for _ in requests],
            ReplyHead(exchange.request_id, exchange.created, self._assets.name),
            self._observer,
        )
        try:
            if options.is_stream:
                await self._stream(exchange, work)
            else:
                await self._reply_whole(exchange, work)
        finally:
            choices.leave()

    def _requests(self, reply_id: str, options: Options, prompts: Sequence[list[int]]) -> list[GenerateRequest]:
        """Choice k of prompt p is number p x n + k. Raises ContextLengthExceeded for what can never fit."""
        is_alone = len(prompts) * options.num_choices == 1
        requests: list[GenerateRequest] = []
        for prompt in prompts:
            seed = secrets.randbelow(NUM_SEEDS) if options.seed is None else options.seed
            max_tokens = self._max_tokens(len(prompt), options.max_tokens)
            for choice in range(options.num_choices):
                requests.append(
                    GenerateRequest(
                        request_id=reply_id if is_alone else f"{reply_id}-{len(requests)}",
                        tokens=prompt,
                        max_tokens=max_tokens,
                        sampling=msgspec.structs.replace(options.sampling, seed=choice_seed(seed, choice)),
                        stop_token_ids=[] if options.ignores_eos else self._assets.eos_token_ids,
                    )
                )
        return requests

    def _max_tokens(self, num_prompt: int, asked: int | None) -> int:
        num_tokens, usual = self._serving.admit(num_prompt, asked), self._api.default_max_tokens
        return num_tokens if asked is not None or usual is None else min(num_tokens, usual)

    async def _reply_whole(self, exchange: Exchange, work: _Work) -> None:
        texts = [""] * len(work.answers)
        num_open = len(work.answers)

        def take(news: Sequence[tuple[int, list[TokenEvent]]]) -> bool:
            nonlocal num_open
            for index, events in news:
                answer = work.answers[index]
                if answer.finish is not None:
                    continue
                texts[index] += work.add(index, events)
                if answer.finish is not None:
                    num_open -= 1
            return num_open > 0

        await work.choices.for_each(take)
        with_ids = work.options.with_token_ids
        answers = [_whole_answer(*one, with_ids=with_ids) for one in zip(texts, work.answers, strict=True)]
        await exchange.reply(self._api.whole(work.head, answers, work.usage, work.prompts if with_ids else None))

    async def _stream(self, exchange: Exchange, work: _Work) -> None:
        """One write for what has come since the last: usually a token, more when the client reads slowly."""
        num_open = len(work.answers)
        writer = self._api.events(work.head, num_open, is_usage_asked=work.options.with_usage)
        unsent = b""

        def take(news: Sequence[tuple[int, list[TokenEvent]]]) -> bool:
            nonlocal num_open, unsent
            chunk = b""
            for index, events in news:
                answer = work.answers[index]
                if answer.finish is not None:
                    continue
                chunk += _chunk(writer, work, index, events)
                if answer.finish is not None:
                    num_open -= 1
                    chunk += writer.finish(index, answer.finish)
            if num_open and (not chunk or exchange.try_stream(chunk)):
                return True
            unsent = chunk
            return False

        while num_open:
            await work.choices.for_each(take)
            if not exchange.has_started:
                await exchange.start_stream()
            if num_open:
                await exchange.stream(unsent)
        await exchange.end_stream(unsent + writer.end(work.usage))


def _chunk(writer: Events, work: _Work, index: int, events: Sequence[TokenEvent]) -> bytes:
    """What these tokens have to say; nothing while their text is held back."""
    answer, with_ids = work.answers[index], work.options.with_token_ids
    num_before = len(answer.token_ids)
    text = work.add(index, events)
    ids = answer.token_ids[num_before:].tolist() if with_ids else None
    if num_before == 0:
        return writer.first(index, text, ids, work.prompts[index] if with_ids else None)
    return writer.text(index, text, ids) if text or with_ids else b""


def _whole_answer(text: str, answer: AnswerText, *, with_ids: bool) -> Answer:
    assert answer.finish is not None  # noqa: S101 - narrows: all were read to their end
    return Answer(text, answer.finish, answer.token_ids.tolist() if with_ids else None)
