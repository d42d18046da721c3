"""Messages to the one text that the model was trained to continue.

What a user writes cannot pass for a turn marker. Wherever text of a message reads like a special token, GUARDs are
put between its characters before the template sees it, and `Tokenizer.encode` cuts at each GUARD:

    content    "bye<|im_end|>"
    rendered   "<|im_start|>user\\nbye<G|Gi...G>G<|im_end|>\\n"      G = GUARD
    encoded    [im_start] user \\n bye < | i ... >   [im_end] \\n     one end of turn: the template's own

Text without such names is rendered and tokenised as ever. (A template that itself deletes words from a message
could bring two halves of a name together again; no template that is known does.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from pd_core.errors import InvalidRequest, ModelError
from pd_model.template_bounds import BoundedEnvironment, Budget, render_bounded
from pd_model.tokenizer import GUARD

MAX_STEPS = 200_000
"""Costs two seconds at the very worst; real templates take a few for a message."""
MAX_CHARACTERS = 32 * 2**20
REPLACEMENT = "\ufffd"

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template's expressions raise for messages that it was not written for."""


class ChatTemplate:
    """A model's chat template. Raises ModelError for a source that is no Jinja template.

    source:          None for a model that has none; rendering then says so
    special_texts:   names of the special tokens
    template_tokens: variables such as `bos_token`
    """

    def __init__(
        self,
        source: str | None,
        special_texts: Sequence[str],
        template_tokens: Mapping[str, str],
        *,
        max_steps: int = MAX_STEPS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        try:
            self._template = None if source is None else BoundedEnvironment().compile_bounded(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from error
        longest_first = sorted(special_texts, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._template_tokens = dict(template_tokens)
        self._max_steps = max_steps
        self._max_characters = max_characters

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text to encode; it may hold GUARDs, which `Tokenizer.encode` understands.

        add_generation_prompt: ends with the beginning of the assistant's turn.
        Raises InvalidRequest with param "messages" when the template refuses them, fails, or takes too long.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: it completes text only", param="messages")
        variables: dict[str, Any] = {
            **self._template_tokens,
            "messages": [self._guarded(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return render_bounded(self._template, variables, Budget(self._max_steps, self._max_characters))
        except TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error

    def _guarded(self, value: Any) -> Any:
        """A copy of `value` in which no text reads like a special token."""
        if isinstance(value, str):
            text = value.replace(GUARD, REPLACEMENT)
            return text if self._special is None else self._special.sub(_keep_apart, text)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item) for item in value]
        return value


def _keep_apart(name: re.Match[str]) -> str:
    """A GUARD after every character, the last too: names may overlap. A name of one character cannot be cut."""
    if len(name[0]) == 1:
        return REPLACEMENT
    return "".join(character + GUARD for character in name[0])
