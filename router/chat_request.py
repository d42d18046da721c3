"""What a client may ask of /v1/chat/completions, and what it becomes inside.

Fields of OpenAI's API fall into four kinds:

    taken        ChatBody below; beside OpenAI's: top_k, min_p, ignore_eos, return_token_ids
    harmless     HARMLESS: they do not change the answer; accepted and not used
    not yet      NOT_SUPPORTED: they would change it; accepted with a value that means "off", else refused by name
    unknown      refused by name

Nothing is dropped in silence. Where OpenAI has a default it is ours: temperature 1. A request without a seed gets a
random one, so that two of them differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pd_core.errors import InvalidRequest, UnknownModel
from pd_core.request import SamplingParams

NoItems = Annotated[list[Any], Meta(max_length=0)] | None
NUM_SEEDS = 2**63
"""Seeds of the sampler are 0 .. 2**63 - 1; a negative one of the client's is counted from the end."""


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


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_obfuscation is OpenAI's padding against traffic analysis; it does not change the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that are taken, with their limits. null is the same as absent."""

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    )
)
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "response_format": ({"type": "text"},),
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
"""Field: values that mean "off", besides null. A whole number is one; a fraction may be written as either."""


class ChatCall(msgspec.Struct, frozen=True):
    """A request that can be meant.

    max_tokens:     None asks for all that fit
    with_usage:     a usage chunk is wanted
    with_token_ids: the reply says which ids prompt and text are made of
    """

    messages: list[dict[str, str]]
    max_tokens: int | None
    sampling: SamplingParams
    is_stream: bool
    with_usage: bool
    with_token_ids: bool
    ignores_eos: bool


def parse_chat(body: bytes, model: str, draw_seed: Callable[[], int]) -> ChatCall:
    """The request in `body`.

    model: the one that is served; draw_seed: gives 0 .. 2**63 - 1 for a request without a seed
    Raises InvalidRequest whose `param` names the field ("messages[0].content"), or UnknownModel.
    """
    tree = _decode(body)
    _check_fields(tree)
    taken = {field: tree[field] for field in ChatBody.__struct_fields__ if field in tree}
    try:
        chat = msgspec.convert(taken, ChatBody)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    if chat.model != model:
        raise UnknownModel(f"the model {_said(chat.model)} is not served here; {model!r} is", param="model")
    return _meant(chat, draw_seed)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        tree = msgspec.json.decode(body)
        _check_keys(tree, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {type(tree).__name__}")
    return tree


_ESCAPED_COLON = re.compile(rb"\\u003a", re.IGNORECASE)


def _check_keys(tree: Any, body: bytes) -> None:
    """Refuses a key that an object has twice; the parser keeps the last one.

    Written anew the tree has as many colons as the body, unless a key and its value were lost: those in texts are the
    same on both sides. Only a body with fewer, or with a colon in disguise, is read a second time to find the key.
    """
    if not _ESCAPED_COLON.search(body) and msgspec.json.encode(tree).count(b":") == body.count(b":"):
        return
    # Numbers do not matter here, and Python would take long for a huge one.
    json.loads(body, object_pairs_hook=_unique, parse_int=len, parse_float=len, strict=False)


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len(dict(pairs)) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"the key {_said(key)} is given twice", param=_short(key))
            seen.add(key)


def _check_fields(tree: dict[str, Any]) -> None:
    for field, value in tree.items():
        if field in ChatBody.__struct_fields__ or field in HARMLESS:
            continue
        if field not in NOT_SUPPORTED:
            raise InvalidRequest(f"unknown field {_said(field)}", param=_short(field))
        if value is not None and not any(_same(value, off) for off in NOT_SUPPORTED[field]):
            raise InvalidRequest(f"{field} is not supported yet; leave it out", param=field)


def _meant(chat: ChatBody, draw_seed: Callable[[], int]) -> ChatCall:
    limits = {chat.max_tokens, chat.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {chat.max_tokens} and max_completion_tokens {chat.max_completion_tokens}: give one of them",
            param="max_completion_tokens",
        )
    with_usage = bool(chat.stream_options and chat.stream_options.include_usage)
    return ChatCall(
        messages=[message.for_template() for message in chat.messages],
        max_tokens=next(iter(limits), None),
        sampling=SamplingParams(
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            top_k=max(chat.top_k or 0, 0),
            min_p=chat.min_p or 0.0,
            seed=draw_seed() if chat.seed is None else chat.seed % NUM_SEEDS,
        ),
        is_stream=bool(chat.stream),
        with_usage=with_usage,
        with_token_ids=bool(chat.return_token_ids),
        ignores_eos=bool(chat.ignore_eos),
    )


_AT_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_QUOTED = re.compile(r"([`'\"])(.*)\1", re.DOTALL)
_NAMED_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `([^`]*)`")


def _named(sentence: str) -> InvalidRequest:
    """msgspec says where it was; a field that is missing or unknown stands in its sentence instead."""
    path = match[1] if (match := _AT_PATH.search(sentence)) else ""
    what = _AT_PATH.sub("", sentence)
    if match := _NAMED_FIELD.match(what):
        path = f"{path}.{match[1]}" if path else match[1]
    path = _short(path)
    what = _QUOTED.sub(lambda match: match[1] + _short(match[2]) + match[1], what)
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


def _same(value: Any, off: Any) -> bool:
    """Equal, and of the same kind: True is not 1, nor is 1.0; but 1 may stand for 1.0."""
    return bool(value == off) and (type(value) is type(off) or (type(value), type(off)) == (int, float))


def _short(said: str, num_chars: int = 100) -> str:
    """A client's own word, short enough to be said back to it."""
    return said if len(said) <= num_chars else said[: num_chars - 1] + "…"


def _said(name: str) -> str:
    """The same in quotation marks; what is not printable counts as it is written."""
    said = repr(name[:101])
    return said if len(said) <= 102 else _short(said, 101) + said[0]
