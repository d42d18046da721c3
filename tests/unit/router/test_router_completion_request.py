from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.errors import InvalidRequest, UnknownModel
from router.api_fields import MAX_CHOICES
from router.completion_request import HARMLESS, NOT_SUPPORTED, CompletionBody, CompletionCall, parse_completion

VOCAB_SIZE = 97


def parse(**fields: Any) -> CompletionCall:
    body = {"model": "m", "prompt": "hello", **fields}
    return parse_completion(json.dumps(body).encode(), "m", VOCAB_SIZE)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        parse(**fields)
    return refusal.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 96, 0], [[1, 2, 96, 0]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"] * MAX_CHOICES, ["a"] * MAX_CHOICES),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert parse(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([""], "prompt[0] is empty"),
        (["a", ""], "prompt[1] is empty"),
        ([[]], "prompt[0] is empty"),
        ([[1], []], "prompt[1] is empty"),
        ([97], "prompt[0] is outside the vocabulary; token ids are 0 to 96"),
        ([1, -1], "prompt[1] is outside the vocabulary"),
        ([[1], [1, 10**30]], "prompt[1][1] is outside the vocabulary"),
        (["a", [1]], "prompt is a list of several kinds"),
        ([[1], "a"], "prompt is a list of several kinds"),
        (["a", 1], "prompt is a list of several kinds"),
        ([1, "a"], "prompt[1] is no token id"),
        ([1, True], "prompt[1] is no token id"),
        ([1, 1.0], "prompt[1] is no token id"),
        ([1, None], "prompt[1] is no token id"),
        ([[1, [2]]], "prompt[0][1] is no token id"),
        ([None], "prompt[0] is no token id"),
        ([{}], "prompt[0] is no token id"),
        (5, "prompt is of another kind"),
        (None, "prompt is of another kind"),
        (True, "prompt is of another kind"),
        ({"text": "a"}, "prompt is of another kind"),
        (["a"] * (MAX_CHOICES + 1), f"{MAX_CHOICES + 1} prompts; at most {MAX_CHOICES}"),
    ],
)
def test_a_prompt_that_cannot_be_meant_is_refused_and_its_place_is_named(prompt: Any, said: str) -> None:
    error = refused(prompt=prompt)
    assert error.param == "prompt"
    assert said in error.message
    assert len(error.message) < 300


def test_a_prompt_that_is_left_out_is_named() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_completion(b'{"model":"m"}', "m", VOCAB_SIZE)
    assert refusal.value.param == "prompt"


def test_prompts_and_choices_together_have_a_bound() -> None:
    assert len(parse(prompt=["a"] * (MAX_CHOICES // 2), n=2).prompts) == MAX_CHOICES // 2
    error = refused(prompt=["a"] * (MAX_CHOICES // 2 + 1), n=2)
    assert error.param == "n"
    assert f"{MAX_CHOICES + 2} choices; at most {MAX_CHOICES}" in error.message


def test_null_is_the_same_as_left_out() -> None:
    optional = set(CompletionBody.__struct_fields__) - {"model", "prompt"}
    assert parse(**dict.fromkeys(optional | set(NOT_SUPPORTED) | HARMLESS)) == parse()
    assert parse().options.max_tokens is None


@pytest.mark.parametrize(("field", "off"), [(field, off) for field, offs in NOT_SUPPORTED.items() for off in offs])
def test_a_field_that_is_not_supported_may_be_off(field: str, off: Any) -> None:
    assert parse(**{field: off}) == parse()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("logprobs", 0),
        ("logprobs", 2),
        ("best_of", 3),
        ("suffix", "x"),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"999999": 5}),
        ("logit_bias", {"x": 1}),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("min_tokens", 1),
        ("response_format", {"type": "json_object"}),
        ("messages", [{"role": "user", "content": "x"}]),
        ("max_completion_tokens", 5),
        ("tools", []),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, True, "5", 2**63])
def test_a_number_of_tokens_that_cannot_be_made_is_refused(max_tokens: Any) -> None:
    assert refused(max_tokens=max_tokens).param == "max_tokens"


def test_another_model_is_not_found() -> None:
    assert isinstance(refused(model="other"), UnknownModel)


PROMPTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=10,
)


@given(PROMPTS)
def test_no_prompt_does_more_harm_than_a_refusal(prompt: Any) -> None:
    try:
        call = parse(prompt=prompt)
    except InvalidRequest as error:
        assert error.param == "prompt"
    else:
        for one in call.prompts:
            assert one
            assert isinstance(one, str) or all(0 <= token < VOCAB_SIZE for token in one)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_harm_than_a_refusal(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_completion(body, "m", VOCAB_SIZE)
