"""Answers of /v1/chat/completions as bytes: one whole reply, or the chunks of a stream.

    data: {role, first text}   data: {text} ...   data: {finish_reason}   [data: {usage}]   data: [DONE]

A stream that fails ends with `data: {"error": ...}` and without [DONE]: clients take that for an error, and a clean end
for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pd_core.errors import KvrelayError
from pd_core.request import FinishReason
from router.http_errors import error_json

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def usage_of(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Every token that was made counts, also the one that ended the text."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


class TokenIds(msgspec.Struct, frozen=True):
    """What prompt and text of a reply are made of, where the client asked for it."""

    prompt: Sequence[int]
    completion: Sequence[int]


def whole_reply(
    reply_id: str,
    created: int,
    model: str,
    text: str,
    finish: FinishReason,
    usage: dict[str, int],
    ids: TokenIds | None,
) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": finish.value,
    }
    reply: dict[str, Any] = {"id": reply_id, "object": "chat.completion", "created": created, "model": model}
    if ids is not None:
        choice["token_ids"] = ids.completion
        reply["prompt_token_ids"] = ids.prompt
    return _encode({**reply, "choices": [choice], "usage": usage})


def error_event(error: KvrelayError) -> bytes:
    return b"data: " + error_json(error) + b"\n\n"


class ChunkWriter:
    """Chunks of one stream. What is the same in each is encoded once: a token costs one small string.

    with_usage: the client asked for a usage chunk; then the others say `"usage": null`
    """

    def __init__(self, reply_id: str, created: int, model: str, *, with_usage: bool) -> None:
        head = _encode({"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._with_usage = with_usage
        self._before = b"data: " + head[:-1] + b',"choices":[{"index":0,"delta":'
        self._after = b"}]" + (b',"usage":null' if with_usage else b"") + b"}\n\n"
        self._usage_before = b"data: " + head[:-1] + b',"choices":[],"usage":'
        self._text_before = self._before + b'{"content":'
        self._text_after = b'},"logprobs":null,"finish_reason":null' + self._after

    def role(self, prompt_ids: Sequence[int] | None) -> bytes:
        """The first chunk; with the prompt's ids where the client asked for them."""
        chunk = self._chunk({"role": "assistant", "content": "", "refusal": None}, None)
        if prompt_ids is None:
            return chunk
        return chunk[:-3] + b',"prompt_token_ids":' + _encode(prompt_ids) + chunk[-3:]

    def text(self, text: str) -> bytes:
        return self._text_before + _encode(text) + self._text_after

    def text_of(self, text: str, token_ids: Sequence[int]) -> bytes:
        """A chunk that says which tokens it is made of; its text is empty while a character is not complete."""
        said = b',"logprobs":null,"finish_reason":null,"token_ids":' + _encode(token_ids)
        return self._text_before + _encode(text) + b"}" + said + self._after

    def end(self, finish: FinishReason, usage: dict[str, int]) -> bytes:
        """The last chunks and [DONE]."""
        last = self._chunk({}, finish.value)
        if self._with_usage:
            last += self._usage_before + _encode(usage) + b"}\n\n"
        return last + DONE

    def _chunk(self, delta: dict[str, Any], finish: str | None) -> bytes:
        return b"".join(
            (self._before, _encode(delta), b',"logprobs":null,"finish_reason":', _encode(finish), self._after)
        )
