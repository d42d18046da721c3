"""What the replies of both endpoints are made of.

A stream is a row of events; their writer encodes what is the same in each of them once, so that a token costs one small
string:

    data: {first of a choice}   data: {text} ...   data: {finish_reason} ...   [data: {usage}]   data: [DONE]

A stream that fails ends with `data: {"error": ...}` and without [DONE]: clients take that for an error, and a clean end
for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pd_core.request import FinishReason

DONE = b"data: [DONE]\n\n"
NO_REASON = b',"logprobs":null,"finish_reason":null'

encode = msgspec.json.Encoder().encode


class ReplyHead(msgspec.Struct, frozen=True):
    """What stands in a reply and in every chunk of a stream. created: seconds since 1970"""

    id: str
    created: int
    model: str

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Answer(msgspec.Struct, frozen=True):
    """One choice of a whole reply. token_ids: None unless the client asked for them"""

    text: str
    finish: FinishReason
    token_ids: Sequence[int] | None


def usage_of(num_prompt: int, num_completion: int) -> dict[str, int]:
    """num_prompt: each prompt once, however many choices it has. Every token made counts, that of the end too."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


class EventWriter:
    """Events of one stream.

    kind:      what the chunks call themselves ("object")
    text_open, text_close: what stands around the text in a choice: `"text":` and nothing, or a delta
    is_usage_asked: the client asked for a usage chunk; then the others say `"usage": null`
    """

    def __init__(
        self,
        head: ReplyHead,
        kind: str,
        *,
        text_open: bytes,
        text_close: bytes,
        num_choices: int,
        is_usage_asked: bool,
    ) -> None:
        opening = b"data: " + encode(head.of(kind))[:-1]
        self._is_usage_asked = is_usage_asked
        self._usage_open = opening + b',"choices":[],"usage":'
        self._choice_open = [opening + b',"choices":[{"index":%d,' % index for index in range(num_choices)]
        self._close = b"}]" + (b',"usage":null' if is_usage_asked else b"") + b"}\n\n"
        self._text_open = [before + text_open for before in self._choice_open]
        self._text_close = text_close
        self._plain_text_close = text_close + NO_REASON + self._close

    def text(self, choice: int, text: str, token_ids: Sequence[int] | None) -> bytes:
        """token_ids: what the text is made of, where the client asked for it"""
        if token_ids is None:
            return self._text_open[choice] + encode(text) + self._plain_text_close
        said = self._text_close + NO_REASON + b',"token_ids":' + encode(token_ids) + self._close
        return self._text_open[choice] + encode(text) + said

    def event(self, choice: int, fields: bytes, beside: bytes = b"") -> bytes:
        """Any event of one choice. fields: of the choice, beside: of the chunk, with a comma in front; both JSON"""
        if not beside:
            return self._choice_open[choice] + fields + self._close
        return self._choice_open[choice] + fields + b"}]" + beside + self._close[2:]

    def end(self, usage: dict[str, int]) -> bytes:
        """After the last choice has ended."""
        if not self._is_usage_asked:
            return DONE
        return self._usage_open + encode(usage) + b"}\n\n" + DONE
