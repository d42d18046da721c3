"""A text never has fewer tokens than the bound says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer

from pd_model.assets import ModelAssets
from pd_model.fake import fake_tokenizer
from pd_model.token_bound import NOTHING_CERTAIN, bound_of
from pd_model.tokenizer import GUARD, Tokenizer

PIECES = ["<|im_start|>", "<|im_end|>", " ", "a", "\x04", "é", "e\u0301", "日", "👍", GUARD]
TEXTS = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", " ", "a", "\x04", "é", "e\u0301", "日", "👍", GUARD])).map(
        "".join
    ),
    st.tuples(st.sampled_from([" ", "=", "\x04", "a", "\n"]), st.integers(0, 3000)).map(lambda of: of[0] * of[1]),
)


@given(TEXTS)
def test_the_real_tokenizer_keeps_to_it(embedded: ModelAssets, text: str) -> None:
    assert embedded.tokenizer.least_tokens(text) <= len(embedded.tokenizer.encode(text))


@given(TEXTS)
def test_one_that_composes_characters_keeps_to_it_too(text: str) -> None:
    tokenizer = changed(normalizer={"type": "NFC"})
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_of_a_text_that_is_too_long_by_far_it_says_enough(embedded: ModelAssets) -> None:
    for text in ("hello world " * 350_000, "a" * 4_000_000, "日本" * 700_000):
        assert embedded.tokenizer.least_tokens(text) > embedded.context_tokens
    assert embedded.tokenizer.least_tokens("\x04" * 4_000_000) == 0  # no token stands for it


def changed(**parts: Any) -> Tokenizer:
    return Tokenizer(json.dumps({**json.loads(tiny_tokenizer().to_str()), **parts}))


def changed_model(**parts: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(tiny_tokenizer().to_str())
    return {"model": {**tree["model"], **parts}}


ADDED = {"id": 0, "content": "<|x|>", "single_word": False, "normalized": False, "special": True}
REMOVING = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [REMOVING, BYTES]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, BYTES]}},
        {"added_tokens": [{**ADDED, "lstrip": False, "rstrip": True}]},
        changed_model(type="WordLevel"),
        changed_model(unk_token="<|x|>"),
    ],
)
def test_where_text_may_be_lost_nothing_is_certain(parts: dict[str, Any]) -> None:
    tree = {**json.loads(tiny_tokenizer().to_str()), **parts}
    assert bound_of(json.dumps(tree), "byte-level") == NOTHING_CERTAIN
    assert NOTHING_CERTAIN.least_tokens("a" * 1000) == 0
    assert bound_of(tiny_tokenizer().to_str(), "byte-level").least_tokens("a" * 1000) > 0


def test_the_fake_replaces_characters_so_nothing_is_certain_of_it() -> None:
    assert fake_tokenizer().least_tokens("👍" * 1000) == 0
