"""How few tokens a text can have at the least, without tokenising it.

Certain, never a guess. Byte-level BPE cuts the bytes of a text into tokens, so there are at least as many of them as
the bytes divided by those of the longest token. What could make that untrue is looked for when the bound is made:

    bytes without a token   are left out by BPE: they do not count
    a normalizer            may shorten the text. NFC keeps ASCII, or puts it into longer characters: so only ASCII
                            counts. Under any other nothing is certain
    anything else           that may drop text (a pre-tokenizer that removes what it splits at, added tokens that
                            swallow spaces) or is not byte-level BPE: nothing is certain, and the bound is 0
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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


def bound_of(tokenizer_json: str, written_bytes: Sequence[str]) -> TokenBound:
    """The bound for a tokenizer. written_bytes: how its vocabulary writes each byte, by the byte's value."""
    tree: dict[str, Any] = json.loads(tokenizer_json)
    model, added = tree["model"], tree.get("added_tokens") or []
    normalizer = (tree.get("normalizer") or {}).get("type")
    if not _is_plain_bpe(model) or not _keeps_all_bytes(tree.get("pre_tokenizer")) or normalizer not in (None, "NFC"):
        return NOTHING_CERTAIN
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return NOTHING_CERTAIN
    vocab = model["vocab"]
    lengths = [len(written) for written in vocab] + [len(token["content"].encode()) for token in added]
    without_token = bytes(byte for byte, written in enumerate(written_bytes) if written not in vocab)
    uncounted = bytes(sorted({*without_token, *(NON_ASCII if normalizer else b"")}))
    return TokenBound(max(lengths, default=0), uncounted)


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
