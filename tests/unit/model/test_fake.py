from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pd_model.assets import load_assets
from pd_model.detokenize import IncrementalDetokenizer
from pd_model.fake import FAKE_END_TOKEN, FAKE_VOCAB_SIZE, fake_model

FAKE = fake_model()
IN_VOCABULARY = st.text(st.sampled_from([chr(code) for code in range(32, 127)] + ["\n"]))


def test_ids_can_be_written_down_by_hand() -> None:
    assert FAKE.tokenizer.encode(" A~\n<|end|>") == [0, 33, 94, 95, 96]
    assert FAKE.tokenizer.decode([0, 33, 94, 95, 96]) == " A~\n"
    assert FAKE.tokenizer.vocab_size == FAKE.vocab_size == FAKE_VOCAB_SIZE == 97
    assert FAKE.eos_token_ids == [FAKE_END_TOKEN]


@given(text=IN_VOCABULARY)
def test_every_character_is_one_token(text: str) -> None:
    ids = FAKE.tokenizer.encode(text, parse_special=False)
    assert ids == [95 if character == "\n" else ord(character) - 32 for character in text]
    assert FAKE.tokenizer.decode(ids) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0")))
def test_any_other_character_reads_as_a_question_mark(text: str) -> None:
    ids = FAKE.tokenizer.encode(text, parse_special=False)
    readable = "".join(character if " " <= character <= "~" or character == "\n" else "?" for character in text)
    assert FAKE.tokenizer.decode(ids) == readable


@given(ids=st.lists(st.integers(0, 96)))
def test_streamed_text_is_decoded_text(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(FAKE.tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == FAKE.tokenizer.decode(ids)


def test_messages_become_lines() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert FAKE.chat_template.render(messages) == "user: hi\nassistant: yo\nassistant: "
    assert FAKE.chat_template.render(messages, add_generation_prompt=False) == "user: hi\nassistant: yo\n"


def test_the_fake_is_loaded_by_its_name_and_needs_no_cache(tmp_path: Path) -> None:
    assets = load_assets("fake", tmp_path / "cache")
    assert assets.name == "fake"
    assert not (tmp_path / "cache").exists()
