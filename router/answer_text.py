"""Tokens of one choice in, text out that is final, and what the reply says of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pd_core.request import FinishReason
from pd_model.detokenize import IncrementalDetokenizer
from pd_model.stop_strings import StopFinder
from pd_model.tokenizer import Tokenizer
from router.unread import TokenEvent


class AnswerText:
    """stops: strings of which the leftmost ends the text.

    token_ids: all tokens that were read, those of a stop string and of the end too
    finish:    None until the text is complete
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._finder = StopFinder(stops) if stops else None
        self.token_ids = array("i")  # small: a reply that nobody reads may have thousands
        self.finish: FinishReason | None = None

    def add(self, events: Sequence[TokenEvent]) -> str:
        """The text that is final now. With the last token, or a stop string, all of it is; nothing is read after."""
        pieces = []
        for event in events:
            if self.finish is not None:
                break
            self.token_ids.append(event.token)
            if event.finish is not FinishReason.STOP:  # the token that ends a text has none
                text = self._detokenizer.push(event.token)
                pieces.append(text if self._finder is None else self._past_stops(text, self._finder))
            if event.finish is not None:
                pieces.append(self._rest(event.finish))
        return "".join(pieces) if len(pieces) != 1 else pieces[0]

    def _past_stops(self, text: str, finder: StopFinder) -> str:
        text = finder.push(text)
        if finder.is_hit:
            self.finish = FinishReason.STOP
        return text

    def _rest(self, finish: FinishReason) -> str:
        """What was held back: a character that is not complete, the beginning of a stop."""
        rest = self._detokenizer.finish()
        if self._finder is not None:
            rest = self._past_stops(rest, self._finder) + self._finder.finish()
            if self._finder.is_hit:
                finish = FinishReason.STOP
        self.finish = finish
        return rest
