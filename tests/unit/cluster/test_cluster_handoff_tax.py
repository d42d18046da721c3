"""What a handoff adds, foretold: by hand, and what must hold whatever the figures are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.handoff_tax import handoff_tax_s
from pd_core.layout import blocks_for

RATES = st.floats(1.0, 1e6)
SPEEDS = st.floats(1e3, 1e12)
TOKENS = st.integers(1, 40_000)
CHUNKS = st.sampled_from([16, 64, 256, 512])


def tax_s(num_tokens, *, chunk_tokens=256, rate=1000.0, speed=1e9, latency_s=0.0, block_bytes=1_000_000):
    return handoff_tax_s(
        num_tokens,
        chunk_tokens=chunk_tokens,
        block_bytes=block_bytes,
        prefill_tokens_per_s=rate,
        bytes_per_s=speed,
        latency_s=latency_s,
    )


def test_where_the_wire_keeps_up_it_is_the_last_chunk_and_the_latency():
    assert tax_s(1024, latency_s=0.002) == pytest.approx(16 * 0.001 + 0.002)
    # the one token more is computed in a millisecond, while the chunk before it is still on the wire for 16
    assert tax_s(1025, latency_s=0.002) == pytest.approx(0.016 - 0.001 + 0.001 + 0.002)


def test_where_it_does_not_what_is_left_of_the_others_comes_on_top():
    # chunks of 16 tokens are done after 1, 2 and 3 s; each takes 2 s on the wire, which is busy from second 1 to 7
    assert tax_s(48, chunk_tokens=16, rate=16.0, speed=5e5) == pytest.approx(7.0 - 3.0)


def test_a_block_that_is_not_full_is_sent_whole_and_once():
    assert tax_s(1, speed=1e6) == pytest.approx(1.0)
    assert tax_s(17, speed=1e6) == pytest.approx(2.0)


@pytest.mark.parametrize(("num_tokens", "chunk_tokens"), [(0, 16), (1, 0)])
def test_a_prompt_without_tokens_is_none(num_tokens, chunk_tokens):
    with pytest.raises(ValueError, match="a prompt of"):
        tax_s(num_tokens, chunk_tokens=chunk_tokens)


@given(TOKENS, CHUNKS, RATES, SPEEDS, st.floats(0.0, 1.0))
def test_it_is_never_less_than_the_last_chunk_nor_more_than_sending_all_at_the_end(
    num_tokens, chunk_tokens, rate, speed, latency_s
):
    last_start = (num_tokens - 1) // chunk_tokens * chunk_tokens
    last_s = (blocks_for(num_tokens) - blocks_for(last_start)) * 1e6 / speed
    all_s = blocks_for(num_tokens) * 1e6 / speed
    tax = tax_s(num_tokens, chunk_tokens=chunk_tokens, rate=rate, speed=speed, latency_s=latency_s)
    slack_s = 1e-9 * (1.0 + all_s + num_tokens / rate)
    assert last_s + latency_s - slack_s <= tax <= all_s + latency_s + slack_s
    least = tax_s(num_tokens, chunk_tokens=chunk_tokens, rate=None, speed=speed, latency_s=latency_s)
    assert least == pytest.approx(last_s + latency_s, abs=slack_s)


@given(st.integers(1, 100), CHUNKS, RATES, SPEEDS, st.floats(0.0, 1.0))
def test_of_whole_chunks_it_is_one_chunk_or_what_is_left_since_the_first(
    num_chunks, chunk_tokens, rate, speed, latency_s
):
    num_tokens, chunk_s = num_chunks * chunk_tokens, chunk_tokens // 16 * 1e6 / speed
    left_s = chunk_tokens / rate + num_chunks * chunk_s - num_tokens / rate
    tax = tax_s(num_tokens, chunk_tokens=chunk_tokens, rate=rate, speed=speed, latency_s=latency_s)
    slack_s = 1e-9 * (1.0 + num_chunks * chunk_s + num_tokens / rate)
    assert tax == pytest.approx(max(chunk_s, left_s) + latency_s, abs=slack_s)


@given(TOKENS, CHUNKS, RATES, SPEEDS)
def test_a_faster_wire_never_costs_more_and_a_faster_prefill_never_less(num_tokens, chunk_tokens, rate, speed):
    now = tax_s(num_tokens, chunk_tokens=chunk_tokens, rate=rate, speed=speed)
    slack_s = 1e-9 * (1.0 + now + num_tokens / rate)
    assert tax_s(num_tokens, chunk_tokens=chunk_tokens, rate=rate, speed=2 * speed) <= now + slack_s
    assert tax_s(num_tokens, chunk_tokens=chunk_tokens, rate=2 * rate, speed=speed) >= now - slack_s
