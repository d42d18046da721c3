"""What a client may ask of /v1/completions; the fields of both endpoints are in api_fields.py."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_core.errors import InvalidRequest
from router import api_fields
from router.api_fields import MAX_CHOICES, AskedFields, Options, check_model, options_of
from router.json_body import check_fields, decode_object, typed_fields

HARMLESS = api_fields.HARMLESS
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {**api_fields.NOT_SUPPORTED, "logprobs": (), "suffix": ("",)}
FORMS = "a prompt must be a text, a list of texts, a list of token ids, or a list of such lists"


class CompletionBody(AskedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that are taken, with their limits. null is the same as absent. prompt: one of FORMS"""

    prompt: Any


Prompt = str | list[int]
"""A text that is still to be tokenised, or token ids."""


class CompletionCall(msgspec.Struct, frozen=True):
    """A request that can be meant. max_tokens of its options: None is for the endpoint to say."""

    prompts: list[Prompt]
    options: Options


def parse_completion(body: bytes, model: str, vocab_size: int) -> CompletionCall:
    """The request in `body`. model: the one that is served; vocab_size: token ids are below it.

    Raises InvalidRequest whose `param` names the field, or UnknownModel.
    """
    tree = decode_object(body)
    check_fields(tree, CompletionBody, HARMLESS, NOT_SUPPORTED)
    asked = typed_fields(tree, CompletionBody)
    check_model(asked.model, model)
    options = options_of(asked, asked.max_tokens)
    return CompletionCall(_prompts(asked.prompt, options.num_choices, vocab_size), options)


def _prompts(asked: Any, num_choices: int, vocab_size: int) -> list[Prompt]:
    is_list = _is_list_of_prompts(asked)
    prompts = list(asked) if is_list else [asked]
    num_prompts = len(prompts)
    if num_prompts > MAX_CHOICES:
        raise _refusal("prompt", f"has {num_prompts} prompts; at most {MAX_CHOICES}")
    if num_prompts * num_choices > MAX_CHOICES:
        why = f"{num_prompts} prompts and n {num_choices} are {num_prompts * num_choices} choices"
        raise InvalidRequest(f"{why}; at most {MAX_CHOICES}", param="n")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise _refusal("prompt", f"is a list of several kinds; {FORMS}")
    for index, prompt in enumerate(prompts):
        name = f"prompt[{index}]" if is_list else "prompt"
        if isinstance(prompt, list):
            _check_ids(prompt, name, vocab_size)
        elif not isinstance(prompt, str):
            raise _refusal(name, f"is of another kind; {FORMS}")
        elif not prompt:
            raise _refusal(name, "is empty; it must have at least one character")
    return prompts


def _is_list_of_prompts(asked: Any) -> bool:
    """An empty list is an empty prompt; one that begins with a number is meant as token ids."""
    return isinstance(asked, list) and bool(asked) and isinstance(asked[0], str | list)


def _check_ids(ids: list[Any], name: str, vocab_size: int) -> None:
    if not ids:
        raise _refusal(name, "is empty; it must have at least one token id")
    if {*map(type, ids)} != {int}:  # True is no id
        wrong = next(index for index, token in enumerate(ids) if type(token) is not int)
        raise _refusal(f"{name}[{wrong}]", f"is no token id; {FORMS}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise _refusal(f"{name}[{wrong}]", f"is outside the vocabulary; token ids are 0 to {vocab_size - 1}")


def _refusal(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", param="prompt")
