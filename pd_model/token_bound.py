"""How few tokens a text can have at the least, without tokenising it.

Certain, never a guess. Byte-level BPE cuts the bytes of a text into tokens, so there are at least as many of them as
the bytes divided by those of the longest token. What could make that untrue is looked for when the bound is made:

    bytes without a token   are left out by BPE: they do not count
    a normalizer            may shorten the text. NFC keeps ASCII, or puts it into longer characters: so only ASCII
                            counts. Under any other nothing is certain
    SentencePiece           with a token for every byte and no rule but spaces to U+2581 loses no byte either
    anything else           that may drop text (a pre-tokenizer that removes what it splits at, added tokens that
                            swallow spaces) or is no such BPE: nothing is certain, and the bound is 0
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from pd_model.gguf_tokenizer import WORD_BOUNDARY
from pd_model.token_form import TokenForm, byte_writer, written_bytes

NON_ASCII = bytes(range(0x80, 0x100))
KEEPS_ALL = ("ByteLevel", "Digits", "Split")
"""Pre-tokenizers that keep every character, as long as Split does not remove."""


class TokenBound(msgspec.Struct, frozen=True):
    """What there is to know of a tokenizer.

    longest_token_bytes: of all tokens, special ones too; 0 when nothing is certain
    uncounted:           bytes to leave out
    """

    longest_token_bytes: int
    uncounted: bytes

    def least_tokens(self, text: str) -> int:
        """The text has at least so many tokens; 0 when nothing is known of it."""
        if not self.longest_token_bytes:
            return 0
        counted = text.encode("utf-8", "ignore").translate(None, self.uncounted)
        return -(-len(counted) // self.longest_token_bytes)


NOTHING_CERTAIN = TokenBound(0, b"")


def bound_of(tokenizer_json: str, form: TokenForm) -> TokenBound:
    """The bound for a tokenizer."""
    tree: dict[str, Any] = json.loads(tokenizer_json)
    if any(token.get("lstrip") or token.get("rstrip") for token in tree.get("added_tokens") or []):
        return NOTHING_CERTAIN
    return _byte_level_bound(tree) if form == "byte-level" else _sentencepiece_bound(tree)


def _byte_level_bound(tree: Mapping[str, Any]) -> TokenBound:
    model, normalizer = tree["model"], (tree.get("normalizer") or {}).get("type")
    if not _is_plain_bpe(model) or not _keeps_all_bytes(tree.get("pre_tokenizer")) or normalizer not in (None, "NFC"):
        return NOTHING_CERTAIN
    vocab = model["vocab"]
    lengths = [len(written) for written in vocab] + _added_lengths(tree)
    without_token = bytes(byte for byte, written in enumerate(written_bytes()) if written not in vocab)
    uncounted = bytes(sorted({*without_token, *(NON_ASCII if normalizer else b"")}))
    return TokenBound(max(lengths, default=0), uncounted)


def _sentencepiece_bound(tree: Mapping[str, Any]) -> TokenBound:
    model = tree["model"]
    if not model.get("byte_fallback") or any(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256)):
        return NOTHING_CERTAIN
    if not _only_marks_spaces(tree):
        return NOTHING_CERTAIN
    bytes_of = byte_writer("sentencepiece")
    return TokenBound(max(*(len(bytes_of(written)) for written in model["vocab"]), *_added_lengths(tree)), b"")


def _added_lengths(tree: Mapping[str, Any]) -> list[int]:
    return [len(token["content"].encode()) for token in tree.get("added_tokens") or []]


def _only_marks_spaces(tree: Mapping[str, Any]) -> bool:
    """Whether the text is left alone but for WORD_BOUNDARY: in front, and in place of spaces."""
    normalizer, splitter = tree.get("normalizer") or {}, tree.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    marks = (
        {"type": "Prepend", "prepend": WORD_BOUNDARY},
        {"type": "Replace", "pattern": {"String": " "}, "content": WORD_BOUNDARY},
    )
    return all(step in marks for step in steps) and splitter.get("type") in (None, "Metaspace")


def _is_plain_bpe(model: Mapping[str, Any]) -> bool:
    unusual = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return model.get("type") == "BPE" and not any(model.get(field) for field in unusual)


def _keeps_all_bytes(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    kinds = [step.get("type") for step in steps]
    removes = any(step.get("behavior") == "Removed" for step in steps)
    return not removes and "ByteLevel" in kinds and all(kind in KEEPS_ALL for kind in kinds)
