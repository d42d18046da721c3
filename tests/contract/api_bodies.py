"""Bodies for the API's endpoints, and what the usual scripts of the workers answer to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
from scripted_worker import num_prompt_tokens

from pd_model.fake import fake_model

MODEL = fake_model()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def completion(prompt: Any = "hello", **more: object) -> dict[str, object]:
    """The body of a completion request."""
    return {"model": "fake", "prompt": prompt, "max_tokens": 8, **more}


def answer_ids(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What the usual scripts make of a prompt."""
    return [(sum(prompt_ids) + index) % 95 for index in range(num_tokens)]


def text_of(ids: Sequence[int]) -> str:
    return MODEL.tokenizer.decode(ids)


def ids_of(text: str) -> list[int]:
    return MODEL.tokenizer.encode(text)


def chat_ids(text: str) -> list[int]:
    ids = ids_of(MODEL.chat_template.render([{"role": "user", "content": text}]))
    assert len(ids) == num_prompt_tokens(text)
    return ids


class Streamed:
    """A streamed reply, read as a client does: what each choice said, and how it ended."""

    def __init__(self, reply: httpx.Response) -> None:
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.text.endswith("\n\n")
        events = [event.removeprefix("data: ") for event in reply.text.removesuffix("\n\n").split("\n\n")]
        self.is_done = events[-1] == "[DONE]"
        self.chunks = [json.loads(event) for event in events if event != "[DONE]"]
        self.error = next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)
        self.usages = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.finishes: dict[int, list[str]] = {}
        for chunk in self.chunks:
            for choice in chunk.get("choices", []):
                self._take(choice["index"], choice)

    def _take(self, index: int, choice: dict[str, Any]) -> None:
        assert index not in self.finishes, "a choice goes on after its end"
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        self.texts[index] = self.texts.get(index, "") + text
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids", []))
        if choice["finish_reason"] is not None:
            self.finishes.setdefault(index, []).append(choice["finish_reason"])
