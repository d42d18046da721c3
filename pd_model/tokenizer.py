"""Text to token ids and back: byte-level BPE of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property

import tokenizers

from pd_core.errors import InvalidRequest, ModelError
from pd_model.folder import ModelFolder
from pd_model.token_bound import bound_of

GUARD = "\ufdd0"
"""Keeps apart what must not become one token. Never tokenised itself.

Unicode sets this code point aside for use inside a program. A chat template puts it into text of a user that
would otherwise read as a special token.
"""


class Tokenizer:
    """A tokenizer whose tokens stand for bytes. Raises ModelError for JSON of any other kind.

    token_bytes: what each id stands for in a text; empty for special tokens and for ids without text.
                 Made at once (0.2 s for 49 000 tokens), so that no first request waits for it.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._special_as_special = _load(tokenizer_json)
        decoder = json.loads(tokenizer_json).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ModelError(f"the tokenizer's decoder is {decoder.get('type')!r}; only 'ByteLevel' is supported yet")
        self.token_bytes = self._bytes_of_tokens()
        self._bound = bound_of(tokenizer_json, _written_bytes())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's own vocabulary may be larger, padded with ids without text."""
        return max(self._special_as_special.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Ids of a text; nothing is put in front or behind.

        parse_special: a special token's name in the text becomes that token (else it is text like any other).
        The text is cut at every GUARD, and the pieces are tokenised each on its own.
        A byte that the vocabulary has no token for (rare control characters) is left out, as everywhere with BPE.
        Raises InvalidRequest for a text with half of a surrogate pair, which no UTF-8 can hold.
        """
        tokenizer = self._special_as_special if parse_special else self._special_as_text
        ids: list[int] = []
        try:
            for piece in text.split(GUARD):
                if piece:
                    ids += tokenizer.encode(piece, add_special_tokens=False).ids
        except TypeError as error:
            raise InvalidRequest("the text holds half of a surrogate pair: it is not Unicode") from error
        return ids

    def least_tokens(self, text: str) -> int:
        """`encode` gives at least so many ids for the text; a thousand times cheaper, and 0 when nothing is certain."""
        return self._bound.least_tokens(text.replace(GUARD, ""))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD. Unknown ids have no text."""
        return str(self._special_as_special.decode(list(ids), skip_special_tokens=True))

    def token_text(self, token: int) -> str | None:
        """How the vocabulary writes a token; None for an id that it does not have."""
        return self._special_as_special.id_to_token(token)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The names of the special tokens, in order of their ids."""
        added = self._special_as_special.get_added_tokens_decoder()
        return tuple(token.content for _, token in sorted(added.items()) if token.special)

    def _bytes_of_tokens(self) -> tuple[bytes, ...]:
        byte_of = {written: byte for byte, written in enumerate(_written_bytes())}
        special = set(self.special_texts)
        table = [b""] * self.vocab_size
        for written, token in self._special_as_special.get_vocab(with_added_tokens=True).items():
            if written in special:
                continue
            if all(character in byte_of for character in written):
                table[token] = bytes(byte_of[character] for character in written)
            else:  # put in by hand, and written as it is
                table[token] = written.encode()
        return tuple(table)

    @cached_property
    def _special_as_text(self) -> tokenizers.Tokenizer:
        tokenizer = _load(self._json)
        tokenizer.encode_special_tokens = True
        return tokenizer


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The tokenizer of a model. Raises ModelError when its kind is not supported."""
    return Tokenizer(folder.tokenizer_path.read_text("utf-8"))


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception for JSON that it cannot use
        raise ModelError(f"the tokenizer cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _written_bytes() -> list[str]:
    """How byte-level BPE writes each byte: printable Latin-1 as itself, the others in order from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    written, next_free = [], 0x100
    for byte in range(256):
        if byte in printable:
            written.append(chr(byte))
        else:
            written.append(chr(next_free))
            next_free += 1
    return written
