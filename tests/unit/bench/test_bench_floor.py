"""The floor of a step, compared with sums made by hand for a tiny model, and with the embedded model's sizes."""

from __future__ import annotations

import pytest

from load_tests.floor import ModelShape, Rates, decode_floor_s, prefill_floor_s

TINY = ModelShape(
    num_layers=2,
    hidden_size=4,
    intermediate_size=6,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=10,
    number_bytes=2,
)
SMOL = ModelShape(30, 576, 1536, 9, 3, 64, 49152, 2)
RATES = Rates(flops_per_s=1e9, read_bytes_per_s=1e9)
LAYER_WEIGHTS = 4 * (4 + 2 * 2) + 4 * 4 + 4 * 12 + 6 * 4


def test_the_weights_of_the_layers_are_those_of_the_four_matrices():
    assert TINY.gemms == [(4, 8), (4, 4), (4, 12), (6, 4)]
    assert TINY.num_layer_weights == 2 * LAYER_WEIGHTS
    assert TINY.num_head_weights == 40


def test_the_embedded_model_has_the_sizes_that_its_name_promises():
    assert 134e6 < SMOL.num_layer_weights + SMOL.num_head_weights < 135e6
    assert SMOL.kv_token_bytes * 16 == 360 * 1024


def test_prefill_is_two_operations_a_weight_and_token_and_causal_attention():
    linear = 2 * 2 * LAYER_WEIGHTS * 3
    attention = (1 + 2 + 3) * 4 * 2 * 2 * 2  # keys of each row x (scores, values) x 2 x heads x head_dim x layers / 2
    assert prefill_floor_s(TINY, RATES, 3) == pytest.approx((linear + attention * 1) / 1e9)


def test_decode_on_a_machine_with_slow_memory_takes_as_long_as_its_bytes():
    slow = Rates(flops_per_s=1e30, read_bytes_per_s=1e3)
    num_bytes = (2 * LAYER_WEIGHTS + 40) * 2 + 3 * (16 + 1) * TINY.kv_token_bytes
    assert TINY.kv_token_bytes == 2 * 2 * 1 * 2 * 2
    assert decode_floor_s(TINY, slow, 3, 16) == pytest.approx(num_bytes / 1e3)


def test_decode_on_a_machine_with_fast_memory_takes_as_long_as_its_multiplications():
    fast = Rates(flops_per_s=1e3, read_bytes_per_s=1e30)
    flops = 3 * (2 * (2 * LAYER_WEIGHTS + 40) + 17 * 4 * 2 * 2 * 2)
    assert decode_floor_s(TINY, fast, 3, 16) == pytest.approx(flops / 1e3)


def test_one_stream_reads_as_many_weights_as_sixteen():
    fast = Rates(flops_per_s=1e30, read_bytes_per_s=1e9)
    one, sixteen = (decode_floor_s(SMOL, fast, streams, 512) for streams in (1, 16))
    assert sixteen - one == pytest.approx(15 * 513 * SMOL.kv_token_bytes / 1e9)
