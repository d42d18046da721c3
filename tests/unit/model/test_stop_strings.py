from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_model.assets import ModelAssets
from pd_model.detokenize import IncrementalDetokenizer
from pd_model.stop_strings import StopFinder


def cut(text: str, stops: list[str]) -> str:
    """The naive rule: the text before the leftmost stop."""
    return text[: min([at for stop in stops if (at := text.find(stop)) >= 0], default=len(text))]


def found_in(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    given_out = [*(finder.push(piece) for piece in pieces), finder.finish()]
    return given_out, finder.is_hit


TEXT = st.text(st.sampled_from("ab\n"), max_size=14)
STOPS = st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=800, deadline=None)
@given(pieces=st.lists(TEXT, max_size=8), stops=STOPS)
@example(pieces=["aab"], stops=["ab"])
@example(pieces=["ababaa"], stops=["abaa"])
@example(pieces=["a", "b"], stops=["ab\n", "b"])
def test_joined_pieces_are_the_text_before_the_leftmost_stop(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    given_out, is_hit = found_in(pieces, stops)
    assert "".join(given_out) == cut(text, stops)
    assert is_hit == any(stop in text for stop in stops)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(TEXT, max_size=8), stops=STOPS)
def test_text_is_held_back_only_as_long_as_it_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    read = given_out = ""
    for piece in pieces:
        read += piece
        given_out += finder.push(piece)
        if finder.is_hit:
            break
        held = read[len(given_out) :]
        assert given_out + held == read
        assert held == "" or any(stop.startswith(held[: len(stop)]) for stop in stops)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=st.text(st.sampled_from("aé日👩\u200d👧 \n0"), min_size=1, max_size=20))
def test_a_stop_across_token_edges_and_half_characters_is_found(
    embedded: ModelAssets, data: st.DataObject, text: str
) -> None:
    tokenizer = embedded.tokenizer
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    # The text in tokens that nobody would have chosen: cut anywhere, also through the bytes of a character.
    byte_ids = {data[0]: token for token, data in enumerate(tokenizer.token_bytes) if len(data) == 1}
    edge = data.draw(st.integers(0, len(text)))
    ids = tokenizer.encode(text[:edge]) + [byte_ids[byte] for byte in text[edge:].encode() if byte in byte_ids]
    whole = tokenizer.decode(ids)
    detokenizer, finder = IncrementalDetokenizer(tokenizer), StopFinder([stop])
    pieces = [finder.push(detokenizer.push(token)) for token in ids]
    pieces += [finder.push(detokenizer.finish()), finder.finish()]
    assert "".join(pieces) == cut(whole, [stop])
    assert "\ufffd" not in "".join(pieces[:-2])


def test_a_stop_that_begins_and_does_not_go_on_is_given_out_with_the_character_that_says_so() -> None:
    assert found_in(["x<", "/", "a", "nd"], ["</and>"]) == (["x", "", "", "", "</and"], False)
    assert found_in(["x<", "/", "a", "rd"], ["</and>"]) == (["x", "", "", "</ard", ""], False)


def test_a_stop_inside_one_that_began_before_waits_for_it() -> None:
    assert found_in(["\nUser", ":", " hi"], ["User", "\nUser:"]) == (["", "", "", ""], True)
    assert found_in(["\nUser", "s", " hi"], ["User", "\nUser:"]) == (["", "\n", "", ""], True)
    assert found_in(["\nUser"], ["User", "\nUser:"]) == (["", "\n"], True)


def test_nothing_comes_after_a_hit() -> None:
    assert found_in(["a.b", "c.", "d"], ["."]) == (["a", "", "", ""], True)


def test_a_stop_as_long_as_allowed_costs_no_more_a_character() -> None:
    stop = "a" * 999 + "b"
    finder = StopFinder([stop])
    assert "".join(finder.push("a") for _ in range(50_000)) == "a" * (50_000 - 999)
    assert finder.push("b") == ""
    assert finder.is_hit


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_a_stop_without_a_character_is_a_fault_of_the_caller(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFinder(stops)
