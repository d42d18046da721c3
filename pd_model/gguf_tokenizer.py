"""Rebuilds a byte-level BPE tokenizer from what GGUF keeps of it: tokens, their types and the merges.

GGUF names the pre-tokenizer instead of storing it. Each name stands for rules that have to be known here; a name that
is not known is refused, because a guess would give other ids than the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pd_core.errors import ModelError

CONTROL, USER_DEFINED = 3, 4
"""GGUF's token types: never part of a text; and put in by hand, matched before anything else."""


def _pre_tokenizer(name: object) -> pre_tokenizers.PreTokenizer:
    if name != "smollm":
        raise ModelError(f"the GGUF file's pre-tokenizer {name!r} is not supported yet; only 'smollm' is")
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def tokenizer_json_from_gguf(values: Mapping[str, Any]) -> str:
    """The tokenizer as the `tokenizers` library's JSON. Raises ModelError for kinds that are not supported."""
    kind = values.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"the GGUF file's tokenizer {kind!r} is not supported yet; only 'gpt2' (byte-level BPE) is")
    missing = {"tokens", "token_type", "merges"} - {key.removeprefix("tokenizer.ggml.") for key in values}
    if missing:
        raise ModelError(f"the GGUF file's tokenizer lacks {', '.join(sorted(missing))}")
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    if len(tokens) != len(types) or len(set(tokens)) != len(tokens):
        raise ModelError("the GGUF file's tokens are not distinct, or not each of them has a type")
    tokenizer = Tokenizer(_bpe(tokens, values["tokenizer.ggml.merges"]))
    tokenizer.pre_tokenizer = _pre_tokenizer(values.get("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return str(tokenizer.to_str())


def _bpe(tokens: list[str], merges: list[str]) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return models.BPE(vocab=vocab, merges=pairs)
    except Exception as error:  # the library raises bare Exception, for merges of tokens that do not exist
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {error}") from error
