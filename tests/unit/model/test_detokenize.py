# ruff: noqa: RUF001  odd characters are what is tested
from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_model.assets import ModelAssets
from pd_model.detokenize import IncrementalDetokenizer
from pd_model.tokenizer import Tokenizer

CHARACTERS = "aé€日本𝔘👩\u200d👧🇩🇪\u0301 \n0"


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The token that stands for each byte."""
    return [tokenizer.token_bytes.index(bytes([byte])) for byte in byte_tokens(tokenizer)]


def byte_tokens(tokenizer: Tokenizer) -> list[int]:
    known = {data[0] for data in tokenizer.token_bytes if len(data) == 1}
    return sorted(known)


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=40))
@example(ids=[])
@example(ids=[2, 1, 0])
def test_pieces_of_any_tokens_join_to_what_decode_gives(embedded: ModelAssets, ids: list[int]) -> None:
    assert "".join(streamed(embedded.tokenizer, ids)) == embedded.tokenizer.decode(ids)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_of_any_bytes_join_to_what_decode_gives(embedded: ModelAssets, data: st.DataObject) -> None:
    """Broken and overlong UTF-8 too, mixed with special tokens that stand between the bytes of a character."""
    drawn = data.draw(st.lists(st.sampled_from([*byte_ids(embedded.tokenizer), 1, 2]), max_size=30))
    assert "".join(streamed(embedded.tokenizer, drawn)) == embedded.tokenizer.decode(drawn)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from(CHARACTERS), max_size=30))
def test_no_piece_of_a_whole_text_ever_holds_half_a_character(embedded: ModelAssets, text: str) -> None:
    pieces = streamed(embedded.tokenizer, embedded.tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_a_character_of_several_tokens_comes_out_with_the_last_of_them(embedded: ModelAssets) -> None:
    token_of = dict(zip(byte_tokens(embedded.tokenizer), byte_ids(embedded.tokenizer), strict=True))
    ids = [token_of[byte] for byte in "é𝔘".encode()]
    assert streamed(embedded.tokenizer, ids) == ["", "é", "", "", "", "𝔘", ""]


def test_an_incomplete_character_is_replaced_at_the_end_and_not_before(embedded: ModelAssets) -> None:
    token_of = dict(zip(byte_tokens(embedded.tokenizer), byte_ids(embedded.tokenizer), strict=True))
    ids = [token_of[ord("a")], *(token_of[byte] for byte in "𝔘".encode()[:3])]
    assert streamed(embedded.tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_and_ids_without_text_add_nothing(embedded: ModelAssets) -> None:
    assert streamed(embedded.tokenizer, [1, 2, 49_152, 10**9]) == ["", "", "", "", ""]


def test_a_negative_id_is_a_fault_of_the_caller(embedded: ModelAssets) -> None:
    with pytest.raises(ValueError, match="-1"):
        IncrementalDetokenizer(embedded.tokenizer).push(-1)
