"""Text to ids by the `tokenizers` library, from the beginning of a text or from inside it."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, Literal

import tokenizers

from pd_core.errors import ModelError
from pd_model.token_form import TokenForm


def read_json(tokenizer_json: str) -> dict[str, Any]:
    """The JSON of a tokenizer. Raises ModelError."""
    try:
        tree = json.loads(tokenizer_json)
    except ValueError as error:
        raise ModelError(f"the tokenizer cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"the tokenizer cannot be read: its JSON is a {type(tree).__name__}")
    return tree


class TextEncoder:
    """One tokenizer with one reading of special tokens' names.

    names:   "tokens" makes them the tokens that they name, "text" is text like any other
    library: the tokenizers library's own, without padding and truncation
    Raises ModelError for JSON that the library cannot use.
    """

    def __init__(self, tokenizer_json: str, form: TokenForm, names: Literal["tokens", "text"]) -> None:
        self._json = tokenizer_json
        self._form = form
        self._names = names
        self.library = self._load(tokenizer_json)

    def encode(self, text: str) -> list[int]:
        """Ids of a text from its beginning: SentencePiece puts a space in front of it, and behind special tokens."""
        return _ids(self.library, text)

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that goes on after another piece: no space is put in front of it."""
        if self._form == "byte-level":
            return _ids(self.library, text)
        first = None if self._added is None else self._added.search(text)
        cut = len(text) if first is None else first.start()
        behind = _ids(self.library, text[cut:]) if cut < len(text) else []
        return _ids(self._inside, text[:cut]) + behind

    @cached_property
    def _inside(self) -> tokenizers.Tokenizer:
        return self._load(_without_space_in_front(self._json))

    @cached_property
    def _added(self) -> re.Pattern[str] | None:
        """Finds the first token that is matched before all else."""
        tokens = self.library.get_added_tokens_decoder().values()
        names = [token.content for token in tokens if self._names == "tokens" or not token.special]
        longest_first = sorted(names, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def _load(self, tokenizer_json: str) -> tokenizers.Tokenizer:
        try:
            tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the tokenizer cannot be read: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = self._names == "text"
        return tokenizer


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    # The library's `encode` lets no other thread run meanwhile: for seconds, when the text is long.
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _without_space_in_front(tokenizer_json: str) -> str:
    """The same tokenizer, but for the space that SentencePiece puts in front: by a normalizer, or by Metaspace."""
    tree: dict[str, Any] = json.loads(tokenizer_json)
    normalizer = tree.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kept = [step for step in steps if step.get("type") != "Prepend"]
    tree["normalizer"] = {"type": "Sequence", "normalizers": kept}
    splitter = tree.get("pre_tokenizer") or {}
    for step in splitter.get("pretokenizers", [splitter]):
        if step.get("type") == "Metaspace":
            step["prepend_scheme"] = "never"
    return json.dumps(tree)
