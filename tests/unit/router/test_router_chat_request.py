from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.errors import InvalidRequest, UnknownModel
from pd_core.request import SamplingParams
from router.api_fields import MAX_CHOICES, MAX_STOP_CHARACTERS, Options
from router.chat_request import HARMLESS, NOT_SUPPORTED, ChatBody, ChatCall, parse_chat

USER = {"role": "user", "content": "hello"}


def parse(**fields: Any) -> ChatCall:
    body = {"model": "m", "messages": [USER], **fields}
    return parse_chat(json.dumps(body).encode(), "m")


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        parse(**fields)
    return refusal.value


def test_what_is_left_out_has_openais_defaults_and_no_seed() -> None:
    assert parse() == ChatCall(
        messages=[USER],
        options=Options(
            max_tokens=None,
            sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
            seed=None,
            num_choices=1,
            stops=[],
            is_stream=False,
            with_usage=False,
            with_token_ids=False,
            ignores_eos=False,
        ),
    )


def test_null_is_the_same_as_left_out() -> None:
    optional = set(ChatBody.__struct_fields__) - {"model", "messages"}
    assert parse(**dict.fromkeys(optional | set(NOT_SUPPORTED) | HARMLESS)) == parse()


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_harmless_fields_change_nothing(field: str) -> None:
    assert parse(**{field: {"any": "thing"}}) == parse()


@pytest.mark.parametrize(("field", "off"), [(field, off) for field, offs in NOT_SUPPORTED.items() for off in offs])
def test_a_field_that_is_not_supported_may_be_off(field: str, off: Any) -> None:
    assert parse(**{field: off}) == parse()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", 0.0),
        ("presence_penalty", False),
        ("min_tokens", 5),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -2),
        ("repetition_penalty", 1.5),
        ("response_format", {"type": "json_object"}),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("reasoning_effort", "low"),
        ("stop_token_ids", [5]),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"surprise": None}, "surprise"),
        ({"x" * 1000: 1}, "x" * 99 + "…"),
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{**USER, "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{**USER, "surprise": 1}]}, "messages[0].surprise"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_completion_tokens": 2**63}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "x" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
        ({"stop": ["x" * (MAX_STOP_CHARACTERS + 1)]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options.surprise"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_limit_that_was_passed_is_named() -> None:
    assert "2.0" in refused(temperature=3).message
    assert str(MAX_CHOICES) in refused(n=1000).message
    assert "at most 4" in refused(stop=["a"] * 5).message
    assert "1000" in refused(stop="x" * 2000).message
    assert "1000" in refused(stop=["x" * 2000]).message


def test_the_limit_of_a_huge_token_number_is_named_and_the_number_is_not_said_back() -> None:
    assert refused(max_tokens=10**400).message.endswith(str(2**63 - 1))


@pytest.mark.parametrize("penalty", [0, 0.0, -0.0])
def test_a_fraction_that_is_off_may_be_written_as_a_whole_number(penalty: float) -> None:
    assert parse(presence_penalty=penalty, frequency_penalty=penalty, repetition_penalty=penalty + 1) == parse()


@pytest.mark.parametrize("word", ["x" * 600_000, "\0" * 600_000, "'" * 600_000, "`" * 600_000])
def test_a_clients_long_word_is_said_back_short(word: str) -> None:
    errors = [
        refused(model=word),
        refused(**{word: 1}),
        refused(messages=[{"role": word, "content": "x"}]),
        refused(messages=[{**USER, word: 1}]),
        refused(messages=[{"role": "user", "content": [{"type": word}]}]),
        refused(stream_options={word: 1}),
    ]
    for error in errors:
        assert len(error.message) < 300
        assert len(error.param or "") <= 100


def refused_text(fields: str) -> InvalidRequest:
    body = '{"model":"m","messages":[{"role":"user","content":"a: b"}]' + fields + "}"
    with pytest.raises(InvalidRequest) as refusal:
        parse_chat(body.encode(), "m")
    return refusal.value


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        (',"n":5,"n":1', "n"),
        (',"max_tokens" : 5 , "max_tokens" : 5', "max_tokens"),
        (',"seed":1,"s\\u0065ed":2', "seed"),
        (',"messages":[{"role":"user","role":"system","content":"x"}]', "role"),
        (',"metadata":{"a":[{"b":1,"b":1}]}', "b"),
        (',"user":"\\u003a","n":5,"n":1', "n"),
        (',"user":"\\u003A","metadata":{"a":1e5,"b":%s,"a":2}' % ("9" * 400), "a"),
        (',"user":"\\u005cu003a","n":5,"n":1', "n"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_by_its_name(fields: str, key: str) -> None:
    error = refused_text(fields)
    assert error.param == key
    assert error.message == f"the key {key!r} is given twice"


def test_a_long_key_that_is_given_twice_is_said_back_short() -> None:
    key = '"%s":1' % ("k" * 100_000)
    assert len(refused_text(f",{key},{key}").message) < 150


@given(st.lists(st.text(alphabet='a:"\\{}u03A\u20ac', max_size=8), max_size=4), st.booleans())
def test_colons_and_escapes_in_texts_are_not_taken_for_keys(texts: list[str], is_ascii: bool) -> None:
    messages = [{"role": "user", "content": text} for text in texts] + [USER]
    body = {"model": "m", "messages": messages, "metadata": {text: {text: text} for text in texts}}
    plain = json.dumps(body, ensure_ascii=is_ascii)
    for written in (plain, plain.replace("a", "\\u0061") if "\\" not in plain else plain):
        assert parse_chat(written.encode(), "m").messages == messages
    with pytest.raises(InvalidRequest, match="twice"):
        parse_chat(plain.replace('"metadata"', '"metadata":"","metadata"').encode(), "m")


def test_another_model_is_not_found() -> None:
    assert isinstance(refused(model="other"), UnknownModel)


def test_both_names_of_the_token_limit_are_understood() -> None:
    assert parse(max_tokens=7) == parse(max_completion_tokens=7) == parse(max_tokens=7, max_completion_tokens=7)


def test_a_negative_seed_is_counted_from_the_end() -> None:
    assert parse(seed=-1).options.seed == 2**63 - 1


def test_one_stop_is_a_list_of_one_and_an_empty_list_is_none() -> None:
    assert parse(stop="x").options.stops == parse(stop=["x"]).options.stops == ["x"]
    assert parse(stop=[]) == parse()
    assert parse(stop=["x" * MAX_STOP_CHARACTERS] * 4).options.stops == ["x" * MAX_STOP_CHARACTERS] * 4


def test_best_of_as_many_as_are_given_out_is_off() -> None:
    assert parse(best_of=1) == parse(n=1) == parse()
    assert parse(n=3, best_of=3) == parse(n=3)


def test_top_k_zero_and_minus_one_are_off() -> None:
    assert parse(top_k=0).options.sampling.top_k == parse(top_k=-1).options.sampling.top_k == 0


def test_parts_of_a_content_are_one_text_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    call = parse(messages=[{"role": "developer", "content": parts}, USER])
    assert call.messages == [{"role": "system", "content": "hello"}, USER]


def test_an_answer_can_be_sent_back_as_clients_do() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert parse(messages=[USER, answer]).messages[1] == {"role": "assistant", "content": "hi"}


@given(st.binary(max_size=200))
def test_no_bytes_do_more_harm_than_a_refusal(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_chat(body, "m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*ChatBody.__struct_fields__, *NOT_SUPPORTED]), JSON, max_size=4))
def test_no_value_in_any_field_does_more_harm_than_a_refusal_that_names_a_field(fields: dict[str, Any]) -> None:
    try:
        call = parse(**fields)
    except InvalidRequest as error:
        assert error.param is None or error.param.split(".")[0].split("[")[0] in {*fields, "model", "messages"}
    else:
        assert 0 <= call.options.sampling.temperature <= 2
        assert call.options.seed is None or 0 <= call.options.seed < 2**63
        assert all(call.options.stops)
