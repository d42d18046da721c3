"""Tokens that have come for a client and were not read yet.

A client that reads slowly, or not at all, may have thousands of them: so they lie here as plain numbers, and become
objects only when they are read.
"""

from __future__ import annotations

from array import array

import msgspec

from pd_core.request import FinishReason


class TokenEvent(msgspec.Struct, frozen=True):
    """One token of the client's stream, in order. at_s: when it reached the router; finish: set on the last."""

    index: int
    token: int
    finish: FinishReason | None
    at_s: float


class UnreadTokens:
    """In order, from `first_index` on; 12 bytes each."""

    def __init__(self, first_index: int) -> None:
        self._next_index = first_index
        self._tokens = array("i")
        self._at_s = array("d")
        self._finish: FinishReason | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int, finish: FinishReason | None, at_s: float) -> None:
        """The next one. Raises OverflowError for what cannot be a token's id."""
        self._tokens.append(token)
        self._at_s.append(at_s)
        self._finish = finish

    def take(self) -> list[TokenEvent]:
        """All of them; nothing is left here."""
        if len(self._tokens) == 1:  # nearly always: it is read as soon as it comes
            event = TokenEvent(self._next_index, self._tokens.pop(), self._finish, self._at_s.pop())
            self._next_index += 1
            return [event]
        if not self._tokens:
            return []
        first, last = self._next_index, self._next_index + len(self._tokens) - 1
        events = [
            TokenEvent(index, token, self._finish if index == last else None, at_s)
            for index, (token, at_s) in enumerate(zip(self._tokens, self._at_s, strict=True), first)
        ]
        self._next_index = last + 1
        self._tokens, self._at_s = array("i"), array("d")
        return events
