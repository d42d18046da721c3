from __future__ import annotations

from msgspec.structs import replace
from tiny_models import MANIFEST

from pd_model.weight_size import weights_bytes

HEAD_NUMBERS = MANIFEST.vocab_size * MANIFEST.hidden_size
ROTARY_BYTES = 2 * MANIFEST.context_tokens * MANIFEST.head_dim * 4
IN_LAYER_NUMBERS = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64


def test_a_tied_head_is_counted_because_it_may_be_packed_anew() -> None:
    numbers = 2 * (IN_LAYER_NUMBERS + 2 * 32) + 32 + 2 * HEAD_NUMBERS
    assert weights_bytes(MANIFEST, "float32", "dtype") == 4 * numbers + ROTARY_BYTES
    assert weights_bytes(MANIFEST, "bfloat16", "dtype") == 2 * numbers + ROTARY_BYTES
    untied = replace(MANIFEST, tied_embeddings=False)
    assert weights_bytes(untied, "bfloat16", "dtype") == weights_bytes(MANIFEST, "bfloat16", "dtype")


def test_biases_and_norms_of_heads_are_counted() -> None:
    more = replace(MANIFEST, biases=["self_attn.q_proj", "mlp.up_proj"], qk_norm=True)
    grown = weights_bytes(more, "bfloat16", "dtype") - weights_bytes(MANIFEST, "bfloat16", "dtype")
    assert grown == 2 * 2 * (32 + 64 + 2 * 16)


def test_int8_takes_a_byte_a_weight_and_a_scale_a_row_but_for_the_embedding() -> None:
    vectors = 2 * (2 * 2 * 32 + 32)
    rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32) + MANIFEST.vocab_size
    expected = 2 * HEAD_NUMBERS + vectors + 2 * IN_LAYER_NUMBERS + HEAD_NUMBERS + 4 * rows + ROTARY_BYTES
    assert weights_bytes(MANIFEST, "bfloat16", "int8") == expected
