"""A model for tests without weights: 97 tokens, one for each character, so that ids can be written down by hand.

    ids 0 .. 94   characters 32 .. 126: id = code - 32
    id 95         newline
    id 96         the end; special, and the only one without text

Any other character reads as "?".
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerBuilder

from pd_model.chat import ChatTemplate
from pd_model.model_assets import ModelAssets
from pd_model.tokenizer import Tokenizer

FAKE_NAME = "fake"
FAKE_VOCAB_SIZE = 97
FAKE_NEWLINE_TOKEN = 95
FAKE_END_TOKEN = 96
FAKE_END_TEXT = "<|end|>"
FAKE_CONTEXT_TOKENS = 4096

CHAT_TEMPLATE = """\
{% for message in messages %}
{{ message['role'] + ': ' + message['content'] + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ 'assistant: ' }}
{%- endif %}"""


def fake_tokenizer() -> Tokenizer:
    """One token for each printable ASCII character and newline, and the end."""
    # Byte-level BPE writes a space as U+0120 and a newline as U+010A; without merges each byte stays a token.
    vocab = {chr(code): code - 32 for code in range(33, 127)} | {"\u0120": 0, "\u010a": FAKE_NEWLINE_TOKEN}
    builder = TokenizerBuilder(models.BPE(vocab=vocab, merges=[]))
    builder.normalizer = normalizers.Replace(Regex(r"[^ -~\n]"), "?")
    builder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    builder.decoder = decoders.ByteLevel()
    builder.add_tokens([AddedToken(FAKE_END_TEXT, special=True, normalized=False)])
    return Tokenizer(builder.to_str())


def fake_model() -> ModelAssets:
    """The fake as the gateway sees it. A message is rendered as `role: content` and a newline."""
    tokenizer = fake_tokenizer()
    return ModelAssets(
        name=FAKE_NAME,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(CHAT_TEMPLATE, tokenizer.special_texts, {"eos_token": FAKE_END_TEXT}),
        eos_token_ids=[FAKE_END_TOKEN],
        context_tokens=FAKE_CONTEXT_TOKENS,
        vocab_size=FAKE_VOCAB_SIZE,
    )
