from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_core.request import FinishReason
from pd_model.fake import FAKE_END_TOKEN, fake_tokenizer
from router.answer_text import AnswerText
from router.unread import TokenEvent

TOKENIZER = fake_tokenizer()
LETTERS = [TOKENIZER.encode(letter)[0] for letter in "ab \n"]


def events(ids: list[int], finish: FinishReason | None) -> list[TokenEvent]:
    last = len(ids) - 1
    return [TokenEvent(at, token, finish if at == last else None, 0.0) for at, token in enumerate(ids)]


def in_batches(answer: AnswerText, all_events: list[TokenEvent], sizes: list[int]) -> str:
    text = ""
    while all_events and answer.finish is None:
        size = sizes.pop() if sizes else 1
        text += answer.add(all_events[:size])
        all_events = all_events[size:]
    return text


@settings(max_examples=600, deadline=None)
@given(
    ids=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=12),
    stops=st.lists(st.text(st.sampled_from("ab \n"), min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=12),
)
def test_however_tokens_come_together_text_reason_and_count_are_the_same(
    ids: list[int], stops: list[str], sizes: list[int]
) -> None:
    full = TOKENIZER.decode(ids)
    places = [at for stop in stops if (at := full.find(stop)) >= 0]
    answer = AnswerText(TOKENIZER, stops)
    text = in_batches(answer, events(ids, FinishReason.LENGTH), sizes)
    assert text == full[: min(places, default=len(full))]
    assert answer.finish is (FinishReason.STOP if places else FinishReason.LENGTH)
    one_by_one = AnswerText(TOKENIZER, stops)
    assert in_batches(one_by_one, events(ids, FinishReason.LENGTH), []) == text
    assert answer.token_ids == one_by_one.token_ids
    assert answer.token_ids.tolist() == ids[: len(answer.token_ids)]


def test_the_end_token_has_no_text_and_what_was_held_comes_with_it() -> None:
    answer = AnswerText(TOKENIZER, ["ab!"])
    assert answer.add(events(TOKENIZER.encode("ab"), None)) == ""
    assert answer.add(events([FAKE_END_TOKEN], FinishReason.STOP)) == "ab"
    assert (answer.finish, len(answer.token_ids)) == (FinishReason.STOP, 3)


def test_tokens_behind_a_stop_are_not_counted() -> None:
    answer = AnswerText(TOKENIZER, ["b"])
    assert answer.add(events(TOKENIZER.encode("abab"), None)) == "a"
    assert answer.token_ids.tolist() == TOKENIZER.encode("ab")
    assert answer.finish is FinishReason.STOP


def test_a_stop_that_the_last_token_completes_is_the_reason() -> None:
    answer = AnswerText(TOKENIZER, ["ab"])
    assert answer.add(events(TOKENIZER.encode("xab"), FinishReason.LENGTH)) == "x"
    assert answer.finish is FinishReason.STOP


@pytest.mark.parametrize("finish", FinishReason)
def test_without_stops_the_reason_is_the_workers(finish: FinishReason) -> None:
    answer = AnswerText(TOKENIZER, [])
    answer.add(events(TOKENIZER.encode("ab"), finish))
    assert answer.finish is finish
