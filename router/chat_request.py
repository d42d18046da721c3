"""What a client may ask of /v1/chat/completions; the fields of both endpoints are in api_fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pd_core.errors import InvalidRequest
from router import api_fields
from router.api_fields import AskedFields, Options, TokenLimit, check_model, options_of
from router.json_body import check_fields, decode_object, typed_fields

NoItems = Annotated[list[Any], Meta(max_length=0)] | None


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. Fields below `content` are what clients send back of an answer of ours; they must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: NoItems = None
    annotations: NoItems = None

    def for_template(self) -> dict[str, str]:
        """`developer` is OpenAI's newer word for `system`; templates know the old one."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(AskedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that are taken, with their limits. null is the same as absent."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: TokenLimit | None = None


HARMLESS = api_fields.HARMLESS | {"parallel_tool_calls"}
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **api_fields.NOT_SUPPORTED,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


class ChatCall(msgspec.Struct, frozen=True):
    """A request that can be meant. max_tokens of its options: None asks for all that fit."""

    messages: list[dict[str, str]]
    options: Options


def parse_chat(body: bytes, model: str) -> ChatCall:
    """The request in `body`. model: the one that is served.

    Raises InvalidRequest whose `param` names the field ("messages[0].content"), or UnknownModel.
    """
    tree = decode_object(body)
    check_fields(tree, ChatBody, HARMLESS, NOT_SUPPORTED)
    chat = typed_fields(tree, ChatBody)
    check_model(chat.model, model)
    limits = {chat.max_tokens, chat.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {chat.max_tokens} and max_completion_tokens {chat.max_completion_tokens}: give one of them",
            param="max_completion_tokens",
        )
    messages = [message.for_template() for message in chat.messages]
    return ChatCall(messages, options_of(chat, max_tokens=next(iter(limits), None)))
