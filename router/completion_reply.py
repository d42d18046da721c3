"""Answers of /v1/completions as bytes: one whole reply, or the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_core.request import FinishReason
from router.reply_parts import NO_REASON, Answer, EventWriter, ReplyHead, encode

KIND = "text_completion"


def whole_completion(
    head: ReplyHead, answers: Sequence[Answer], usage: dict[str, int], prompt_ids: Sequence[Sequence[int]] | None
) -> bytes:
    """prompt_ids: of each answer's prompt; None unless the client asked for them"""
    choices = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {
            "text": answer.text,
            "index": index,
            "logprobs": None,
            "finish_reason": answer.finish.value,
        }
        if answer.token_ids is not None:
            choice["token_ids"] = answer.token_ids
        if prompt_ids is not None:
            choice["prompt_token_ids"] = prompt_ids[index]
        choices.append(choice)
    return encode({**head.of(KIND), "choices": choices, "usage": usage})


class CompletionEvents(EventWriter):
    def __init__(self, head: ReplyHead, *, num_choices: int, is_usage_asked: bool) -> None:
        super().__init__(
            head,
            KIND,
            text_open=b'"text":',
            text_close=b"",
            num_choices=num_choices,
            is_usage_asked=is_usage_asked,
        )

    def first(self, choice: int, text: str, token_ids: Sequence[int] | None, prompt_ids: Sequence[int] | None) -> bytes:
        """Begins a choice, its text empty or not; with its prompt's ids where the client asked for them."""
        if prompt_ids is None:
            return self.text(choice, text, token_ids)
        ids = b',"token_ids":' + encode(token_ids) + b',"prompt_token_ids":' + encode(prompt_ids)
        return self.event(choice, b'"text":' + encode(text) + NO_REASON + ids)

    def finish(self, choice: int, reason: FinishReason) -> bytes:
        return self.event(choice, b'"text":"","logprobs":null,"finish_reason":' + encode(reason.value))
