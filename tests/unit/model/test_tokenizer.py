"""The embedded model's tokenizer, rebuilt from GGUF, against other sources."""

# ruff: noqa: RUF001  odd characters are what is tested

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer

from pd_core.errors import InvalidRequest, ModelError
from pd_model.assets import ModelAssets
from pd_model.folder import embedded_gguf
from pd_model.tokenizer import GUARD, Tokenizer

TRICKY = [
    "",
    " ",
    "Hello, world!",
    "  leading and   inner    runs \t of\t\twhitespace  \n\n  \n",
    "\r\n\r\n",
    "in 2024, 1234567890 + 0.5e-10 = 007",
    "x1y22z333",
    "١٢٣ ４５６ Ⅷ ½",
    "don't we'll I'VE they're",
    "naïve café résumé \u0301e\u0301",
    "日本語の文章です。中文字符，한국어",
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪 👍🏽",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u202eRTL\u202c עברית العربية",
    "\x00\x01\x7f\x80\ufffd\uffff",
    "def f(x):\n    return x**2  # <- square\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|><|im_end|> <|im_end|>\n",
    "<|im_end", "|im_end|>", "<|endoftext|>123<repo_name>",
    "a" * 300,
    "\u00a0\u2003\u3000",
]  # fmt: skip

BYTES_WITHOUT_TOKEN = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
"""Six control characters, the first byte of planes 4 to 11, and bytes that UTF-8 does not have: never in training."""


def test_bytes_that_the_model_was_never_trained_on_have_no_token(embedded: ModelAssets) -> None:
    with_token = {data[0] for data in embedded.tokenizer.token_bytes if len(data) == 1}
    assert set(range(256)) - with_token == BYTES_WITHOUT_TOKEN
    assert embedded.tokenizer.encode("a\x04b") == [81, 82]


def test_known_ids_of_the_models_own_chat_prompt(embedded: ModelAssets) -> None:
    """What the tokenizer published with the model is widely documented to give."""
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert embedded.tokenizer.encode(system) == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511,
        308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    ]  # fmt: skip
    assert embedded.tokenizer.encode("<|im_start|>assistant\n") == [1, 520, 9531, 198]
    assert embedded.tokenizer.encode("What is the capital of France?") == [1780, 314, 260, 3575, 282, 4649, 47]
    assert embedded.tokenizer.encode("Hello, 世界!") == [19556, 28, 216, 7906, 240, 178, 239, 230, 17]


def test_each_digit_is_a_token_of_its_own(embedded: ModelAssets) -> None:
    zero = 32
    assert embedded.tokenizer.token_text(zero) == "0"
    assert embedded.tokenizer.encode("2024") == [zero + 2, zero, zero + 2, zero + 4]


def test_ids_agree_with_transformers_own_reading_of_the_same_file(embedded: ModelAssets) -> None:
    """transformers rebuilds the merges itself; what it is known to miss, the digits, is put right first."""
    path = embedded_gguf()
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    theirs.decoder = decoders.ByteLevel()
    for text in TRICKY:
        ids = embedded.tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert embedded.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TRICKY)
def test_text_survives_the_way_to_ids_and_back(embedded: ModelAssets, text: str) -> None:
    assert embedded.tokenizer.decode(embedded.tokenizer.encode(text, parse_special=False)) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_characters=GUARD, exclude_categories=["Cs"])))
def test_any_text_survives_the_way_to_ids_and_back(embedded: ModelAssets, text: str) -> None:
    ids = embedded.tokenizer.encode(text, parse_special=False)
    kept = bytes(byte for byte in text.encode() if byte not in BYTES_WITHOUT_TOKEN)
    assert embedded.tokenizer.decode(ids) == kept.decode(errors="replace")
    assert all(0 <= token < embedded.vocab_size for token in ids)


def test_names_of_special_tokens_are_tokens_or_text_as_asked(embedded: ModelAssets) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    as_text = tokenizer.encode("a<|im_end|>b", parse_special=False)
    assert 2 not in as_text
    assert tokenizer.decode(as_text) == "a<|im_end|>b"
    assert tokenizer.decode([2, 1, 0]) == ""


def test_a_guard_separates_and_leaves_no_trace(embedded: ModelAssets) -> None:
    tokenizer = embedded.tokenizer
    ids = tokenizer.encode(f"<|im_{GUARD}end|>")
    assert 2 not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_the_vocabulary_is_the_models(embedded: ModelAssets) -> None:
    assert embedded.tokenizer.vocab_size == embedded.vocab_size == 49152
    assert embedded.eos_token_ids == [2]
    assert embedded.context_tokens == 8192
    assert embedded.name == "smollm2-135m-instruct"
    assert len(embedded.tokenizer.special_texts) == 17


def test_ids_without_text_decode_to_nothing(embedded: ModelAssets) -> None:
    assert embedded.tokenizer.decode([10**6]) == ""
    assert embedded.tokenizer.token_text(10**6) is None


def test_half_a_surrogate_pair_is_the_clients_fault(embedded: ModelAssets) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        embedded.tokenizer.encode("a\ud800")


def test_a_tokenizer_of_another_kind_is_refused_by_name() -> None:
    other = tiny_tokenizer()
    other.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(other.to_str())


def test_a_tokenizer_that_is_no_json_is_an_error() -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer("{")


def test_other_threads_run_while_a_long_text_is_tokenised(embedded: ModelAssets) -> None:
    """Else every stream of the router would stand still for it, though it is read beside the event loop."""
    is_over, beats = threading.Event(), []

    def beat() -> None:
        while not is_over.wait(0.001):
            beats.append(None)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        num_tokens = len(embedded.tokenizer.encode("hello wonderful world, " * 20_000))  # a tenth of a second and more
    finally:
        is_over.set()
        beating.join()
    assert num_tokens == 80_001
    assert len(beats) > 20
