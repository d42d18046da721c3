"""Answers of /v1/chat/completions as bytes: one whole reply, or the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_core.request import FinishReason
from router.reply_parts import NO_REASON, Answer, EventWriter, ReplyHead, encode

ROLE = b'"delta":{"role":"assistant","content":"","refusal":null}' + NO_REASON


def whole_chat(
    head: ReplyHead, answers: Sequence[Answer], usage: dict[str, int], prompt_ids: Sequence[int] | None
) -> bytes:
    """prompt_ids: None unless the client asked for them"""
    reply = head.of("chat.completion")
    if prompt_ids is not None:
        reply["prompt_token_ids"] = prompt_ids
    return encode({**reply, "choices": [_choice(*numbered) for numbered in enumerate(answers)], "usage": usage})


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        "finish_reason": answer.finish.value,
    }
    if answer.token_ids is not None:
        choice["token_ids"] = answer.token_ids
    return choice


class ChatEvents(EventWriter):
    def __init__(self, head: ReplyHead, *, num_choices: int, is_usage_asked: bool) -> None:
        super().__init__(
            head,
            "chat.completion.chunk",
            text_open=b'"delta":{"content":',
            text_close=b"}",
            num_choices=num_choices,
            is_usage_asked=is_usage_asked,
        )

    def first(self, choice: int, text: str, token_ids: Sequence[int] | None, prompt_ids: Sequence[int] | None) -> bytes:
        """Begins a choice: the role, with the prompt's ids where the client asked for them, and the first text."""
        role = self.event(choice, ROLE, b"" if prompt_ids is None else b',"prompt_token_ids":' + encode(prompt_ids))
        return role + self.text(choice, text, token_ids) if text or token_ids is not None else role

    def finish(self, choice: int, reason: FinishReason) -> bytes:
        return self.event(choice, b'"delta":{},"logprobs":null,"finish_reason":' + encode(reason.value))
