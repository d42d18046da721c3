"""Tokenizers rebuilt from GGUF, against other sources for the same rules."""

# ruff: noqa: RUF001  odd characters are what is tested

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from pd_core.errors import ModelError
from pd_model.gguf_tokenizer import tokenizer_json_from_gguf
from pd_model.tokenizer import GUARD, Tokenizer

SPECIAL = ["<|begin|>", "<|end|>"]
TRICKY = [
    "Hello, world!",
    "  leading and   inner    runs \t of\t\twhitespace  \n\n  \n",
    "\r\n\r\n x\n\n  y \r\n",
    "in 2024, 1234567890 + 0.5e-10 = 007",
    "١٢٣ ４５６ Ⅷ ½",
    "don't we'll I'VE they're DON'T 'Sup",
    "naïve café résumé \u0301e\u0301",
    "日本語の文章です。中文字符，한국어",
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪 👍🏽",
    "def f(x):\n    return x**2  # <- square!!!\n\n\n",
    "a_b-c/d\\e (f)[g]{h} \u00a0\u2003\u3000z",
]
TEXTS = st.lists(
    st.sampled_from([*"aAsStT'12 \n\r\t.,!(_é日½½", "  ", "the", " of", "\u0301", "\u00a0", "👍", "'ll", "'S"])
).map("".join)


@pytest.fixture(scope="module")
def bpe() -> dict[str, Any]:
    """Merges across words, so that every cut of the pre-tokenizer shows in the ids."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    library.train_from_iterator([text * 2 for text in TRICKY], trainer)
    model = json.loads(library.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def gguf_values(bpe: dict[str, Any], pre: str | None, **changed: Any) -> dict[str, Any]:
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *SPECIAL],
        "token_type": [1] * len(tokens) + [3] * len(SPECIAL),
        "merges": [f"{left} {right}" for left, right in bpe["merges"]],
        "bos_token_id": len(tokens),
        **changed,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def ours(bpe: dict[str, Any], pre: str, **changed: Any) -> Tokenizer:
    return Tokenizer(tokenizer_json_from_gguf(gguf_values(bpe, pre, **changed)))


def theirs(bpe: dict[str, Any], pre: str) -> Library:
    """The same rules as transformers has them, for the models that GGUF's names come from."""
    if pre == "gpt-2":
        return GPT2Tokenizer(vocab=dict(bpe["vocab"]), merges=list(bpe["merges"])).backend_tokenizer
    if pre == "qwen2":
        return Qwen2Tokenizer(vocab=dict(bpe["vocab"]), merges=list(bpe["merges"])).backend_tokenizer
    assert pre == "llama-bpe"
    words = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    library = Library(models.BPE(vocab=bpe["vocab"], merges=bpe["merges"], ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    return library


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_ids_of_tricky_texts_are_those_of_transformers(bpe: dict[str, Any], pre: str) -> None:
    found, expected = ours(bpe, pre), theirs(bpe, pre)
    for text in TRICKY:
        assert found.encode(text) == expected.encode(text, add_special_tokens=False).ids, text


def test_each_pre_tokenizer_cuts_in_its_own_way(bpe: dict[str, Any]) -> None:
    """Else the comparisons with transformers would prove little."""
    kinds = ("gpt-2", "smollm", "qwen2", "llama-bpe")
    assert len({tuple(ours(bpe, pre).encode("".join(TRICKY))) for pre in kinds}) == len(kinds)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_ids_of_any_text_are_those_of_transformers(bpe: dict[str, Any], pre: str) -> None:
    found, expected = ours(bpe, pre), theirs(bpe, pre)

    @settings(max_examples=200, deadline=None)
    @given(text=TEXTS)
    def same_ids(text: str) -> None:
        ids = found.encode(text)
        assert ids == expected.encode(text, add_special_tokens=False).ids
        if pre != "qwen2":  # which composes characters first
            assert found.decode(ids) == text

    same_ids()


def test_a_word_that_is_a_token_is_that_token_in_llama_bpe_alone(bpe: dict[str, Any]) -> None:
    """By merges alone it could not be reached."""
    vocab = {**bpe["vocab"], "zqzq": len(bpe["vocab"])}
    changed = {"vocab": vocab, "merges": bpe["merges"]}
    assert ours(changed, "llama-bpe").encode("zqzq") == [vocab["zqzq"]]
    assert ours(changed, "gpt-2").encode("zqzq") == [vocab[letter] for letter in "zqzq"]


@pytest.mark.parametrize("pre", ["default", "tekken", "deepseek-r1-qwen", None])
def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name(bpe: dict[str, Any], pre: str | None) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.pre {pre!r}; .*: gpt-2, smollm, qwen2, llama-bpe"):
        tokenizer_json_from_gguf(gguf_values(bpe, pre))


@pytest.mark.parametrize(
    ("pre", "says", "puts"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("gpt-2", True, True)],
)
def test_the_bos_token_belongs_in_front_of_texts_where_the_file_or_its_kind_says_so(
    bpe: dict[str, Any], pre: str, says: bool | None, puts: bool
) -> None:
    tokenizer = ours(bpe, pre, add_bos_token=says)
    assert tokenizer.text_prefix == ((len(bpe["vocab"]),) if puts else ())
    assert tokenizer.encode("the") == ours(bpe, pre).encode("the"), "encode itself puts nothing in front"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"merges": None}, "lacks merges"),
        ({"token_type": [1]}, "not each of them has a type"),
        ({"merges": ["no such"]}, "merges do not fit"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id 1000000"),
    ],
)
def test_what_does_not_fit_together_is_refused(bpe: dict[str, Any], changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        tokenizer_json_from_gguf(gguf_values(bpe, "gpt-2", **changed))


# SentencePiece

PIECES: dict[str, Any] = json.loads((Path(__file__).parent / "sentencepiece.json").read_text())
"""A small model that sentencepiece itself was trained to, and the ids that it gives."""


def sentencepiece_values(**changed: Any) -> dict[str, Any]:
    values = {
        "model": "llama",
        "tokens": PIECES["tokens"],
        "scores": PIECES["scores"],
        "token_type": PIECES["types"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changed,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def sentencepiece(**changed: Any) -> Tokenizer:
    return Tokenizer(tokenizer_json_from_gguf(sentencepiece_values(**changed)))


def joined_by_score(text: str) -> list[int]:
    """The rule itself, slowly: join the neighbours that make the best piece, the leftmost first, until none do."""
    ids = {token: token_id for token_id, token in enumerate(PIECES["tokens"])}
    score = {token: PIECES["scores"][token_id] for token, token_id in ids.items() if PIECES["types"][token_id] == 1}
    parts = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        ways = [
            (-score[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in score
        ]
        if not ways:
            break
        _, at = min(ways)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in score else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("example", PIECES["texts"], ids=lambda example: ascii(example["text"][:20]))
def test_ids_are_those_of_sentencepiece_itself(example: dict[str, Any]) -> None:
    assert sentencepiece().encode(example["text"]) == example["ids"]
    assert joined_by_score(example["text"]) == example["ids"]


SPACED = sentencepiece()


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_ids_of_any_text_are_those_of_the_rule_and_its_bytes_come_back(text: str) -> None:
    ids = SPACED.encode(text, parse_special=False)
    assert ids == joined_by_score(text)
    assert SPACED.decode(ids) == (" " + text if text else "")
    assert SPACED.least_tokens(text) <= len(ids)
    assert SPACED.least_tokens("word " * 10_000) > 1000


def test_without_the_space_in_front_a_text_stays_as_it_is() -> None:
    bare = sentencepiece(add_space_prefix=False)
    assert bare.decode(bare.encode("the ledger")) == "the ledger"


def test_a_guard_neither_adds_a_space_nor_lets_names_through() -> None:
    """Names of special tokens in a message are cut up; the message must read as it was written."""
    cut = "".join(character + GUARD for character in "<s>")
    ids = SPACED.encode(f"<s>[INST] a{cut}b c</s>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert not {1, 2} & set(ids[1:-1])
    assert SPACED.decode(ids) == " [INST] a<s>b c"
    behind = SPACED.encode(f"<{GUARD}x</s> y")
    assert SPACED.decode(behind) == " <x  y", "behind a special token there is a space again"


def test_bytes_of_a_rare_character_are_put_together() -> None:
    ids = SPACED.encode("👍")
    assert len(ids) == 5
    assert [SPACED.token_bytes[token] for token in ids] == [b" ", *(bytes([byte]) for byte in "👍".encode())]
    assert SPACED.decode(ids[:-1]) == " \ufffd"


def test_special_tokens_have_no_text_and_bos_belongs_in_front() -> None:
    assert SPACED.special_texts == ("<unk>", "<s>", "</s>")
    assert SPACED.decode([1, *SPACED.encode("ok"), 2]) == " ok"
    assert SPACED.text_prefix == (1,)
    assert sentencepiece(add_bos_token=False).text_prefix == ()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"scores": None}, "lacks scores"),
        ({"scores": [0.0]}, "a type and a score"),
        ({"remove_extra_whitespaces": True}, "rewrites its text"),
        ({"precompiled_charsmap": [1, 2]}, "rewrites its text"),
    ],
)
def test_other_sentencepiece_models_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        tokenizer_json_from_gguf(sentencepiece_values(**changed))


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_folders_sentencepiece_tokenizer_is_read_too(scheme: str) -> None:
    """As newer conversions write it: Metaspace in place of the normalizer, and a Strip step behind the decoder."""
    library = Library.from_str(tokenizer_json_from_gguf(sentencepiece_values()))
    library.normalizer = normalizers.Sequence([])
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(library.to_str())
    for example in PIECES["texts"]:
        text = example["text"].lstrip(" \u2581")  # in front of a space Metaspace puts no other
        assert tokenizer.encode(text, parse_special=False) == SPACED.encode(text, parse_special=False)
    guarded = tokenizer.encode(f"a<{GUARD}s>b")
    assert tokenizer.decode(guarded) == " a<s>b"
    assert tokenizer.least_tokens("word " * 10_000) > 1000
