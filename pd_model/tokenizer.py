"""Text to token ids and back: byte-level BPE, or SentencePiece's, of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pd_core.errors import InvalidRequest
from pd_model.folder import ModelFolder
from pd_model.text_encoder import TextEncoder, read_json
from pd_model.token_bound import bound_of
from pd_model.token_form import byte_writer, form_of

GUARD = "\ufdd0"
"""Keeps apart what must not become one token. Never tokenised itself.

Unicode sets this code point aside for use inside a program. A chat template puts it into text of a user that
would otherwise read as a special token.
"""


class Tokenizer:
    """A tokenizer whose tokens stand for bytes. Raises ModelError for JSON of any other kind.

    token_bytes: what each id stands for in a text; empty for special tokens and for ids without text.
                 Made at once (0.2 s for 49 000 tokens), so that no first request waits for it.

    SentencePiece puts a space in front of a text (and behind special tokens). It is part of the first token and is
    kept when that is turned into text again: the pieces of a stream go on where the prompt ended.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._form = form_of(read_json(tokenizer_json))
        self._special_names = TextEncoder(tokenizer_json, self._form, "tokens")
        self._library = self._special_names.library
        self.token_bytes = self._bytes_of_tokens()
        self._bound = bound_of(tokenizer_json, self._form)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's own vocabulary may be larger, padded with ids without text."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Ids of a text; nothing is put in front or behind.

        parse_special: a special token's name in the text becomes that token (else it is text like any other).
        The text is cut at every GUARD, and the pieces are tokenised each on its own.
        A byte that the vocabulary has no token for (rare control characters) is left out, as everywhere with BPE.
        Raises InvalidRequest for a text with half of a surrogate pair, which no UTF-8 can hold.
        """
        encoder = self._special_names if parse_special else self._text_names
        ids: list[int] = []
        try:
            for piece in filter(None, text.split(GUARD)):
                ids += encoder.encode_inside(piece) if ids else encoder.encode(piece)
        except TypeError as error:
            raise InvalidRequest("the text holds half of a surrogate pair: it is not Unicode") from error
        return ids

    def least_tokens(self, text: str) -> int:
        """`encode` gives at least so many ids for the text; a thousand times cheaper, and 0 when nothing is certain."""
        return self._bound.least_tokens(text.replace(GUARD, ""))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD. Unknown ids have no text."""
        known = (self.token_bytes[token] for token in ids if 0 <= token < len(self.token_bytes))
        return b"".join(known).decode("utf-8", "replace")

    def token_text(self, token: int) -> str | None:
        """How the vocabulary writes a token; None for an id that it does not have."""
        return self._library.id_to_token(token)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The names of the special tokens, in order of their ids."""
        added = self._library.get_added_tokens_decoder()
        return tuple(token.content for _, token in sorted(added.items()) if token.special)

    @cached_property
    def text_prefix(self) -> tuple[int, ...]:
        """The ids that belong in front of a text which no chat template has written: the bos token, or none."""
        bare = self._special_names.encode("a")
        whole: list[int] = self._library.encode("a", add_special_tokens=True).ids
        starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
        return tuple(whole[: next(starts, 0)])

    def _bytes_of_tokens(self) -> tuple[bytes, ...]:
        bytes_of, special = byte_writer(self._form), set(self.special_texts)
        table = [b""] * self.vocab_size
        for written, token in self._library.get_vocab(with_added_tokens=True).items():
            if written not in special:
                table[token] = bytes_of(written)
        return tuple(table)

    @cached_property
    def _text_names(self) -> TextEncoder:
        return TextEncoder(self._json, self._form, "text")


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The tokenizer of a model. Raises ModelError when its kind is not supported."""
    return Tokenizer(folder.tokenizer_path.read_text("utf-8"))
