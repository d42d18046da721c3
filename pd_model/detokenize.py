"""Text of a stream of tokens, piece by piece, without ever half a character."""

from __future__ import annotations

import codecs

from pd_model.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The pieces that `push` and `finish` give are, joined, `tokenizer.decode` of all the tokens.

    A token stands for bytes, and a character may need those of several tokens: bytes are held until their
    character is complete, or until it is certain that they are none (U+FFFD, as in `decode`). At most three bytes
    are ever held, so a token costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_holding = False

    def push(self, token: int) -> str:
        """The text that is final now; may be empty. Special tokens and ids without text add nothing."""
        if token < 0:
            raise ValueError(f"token id {token} is below 0")
        if token >= len(self._token_bytes):
            return ""
        data = self._token_bytes[token]
        if data.isascii() and not self._is_holding:  # most tokens, and five times faster
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self._is_holding = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """The rest, at the end of the stream: an incomplete character is U+FFFD."""
        return self._utf8.decode(b"", final=True)
