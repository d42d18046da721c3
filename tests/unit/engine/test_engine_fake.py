"""The fake engine, computed by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, EngineError, LayoutMismatch
from pd_core.layout import check_pairing
from pd_core.request import GenerateRequest, SamplingParams, continue_request
from pd_engine.fake import DECODE_FACTOR, FAKE_LAYOUT, PREFILL_FACTOR, FakeEngine
from pd_engine.reference import generate_alone
from pd_engine.scratch import ScratchMemory
from pd_engine.steps import never

GREEDY = SamplingParams()


@pytest.fixture
def memory() -> ScratchMemory:
    return ScratchMemory(8, FAKE_LAYOUT.block_bytes)


@pytest.fixture
def engine(memory: ScratchMemory) -> FakeEngine:
    return FakeEngine(PREFILL_FACTOR, memory)


def test_the_next_token_is_twice_the_sum_of_the_last_three(engine):
    assert engine.step([SequenceStep([5, 10, 20, 30], 0, [0], GREEDY)], never) == [(10 + 20 + 30) * 2 % 97]


def test_fewer_than_three_tokens_are_summed_where_fewer_exist(engine):
    assert engine.step([SequenceStep([11], 0, [0], GREEDY)], never) == [22]
    assert engine.step([SequenceStep([90, 11], 0, [1], GREEDY)], never) == [202 % 97]


def test_decode_multiplies_by_three_so_that_a_token_tells_who_made_it(memory):
    prefill, decode = FakeEngine(PREFILL_FACTOR, memory), FakeEngine(DECODE_FACTOR, memory)
    assert prefill.step([SequenceStep([1, 2, 3], 0, [4], GREEDY)], never) == [12]
    assert decode.step([SequenceStep([12], 3, [4], GREEDY)], never) == [(2 + 3 + 12) * 3]


def test_kv_of_a_token_is_its_id_plus_its_position_all_over_its_slot(engine, memory):
    engine.step([SequenceStep(list(range(18)), 0, [2, 6], None)], never)
    second = bytes(memory.block(6))
    assert second[8:16] == bytes([17 + 17] * 8), "K of position 17"
    assert second[128 + 8 : 128 + 16] == bytes([17 + 17] * 8), "V of position 17"
    assert second[16:128] == bytes(112), "slots without a token stay zero"


def test_the_byte_wraps_at_251(engine, memory):
    tokens = [96] * 160
    engine.step([SequenceStep(tokens[:128], 0, list(range(8)), None)], never)
    assert memory.block(7)[15 * 8] == (96 + 127) % 251
    engine = FakeEngine(PREFILL_FACTOR, ScratchMemory(10, FAKE_LAYOUT.block_bytes))
    assert engine.step([SequenceStep(tokens, 0, list(range(10)), GREEDY)], never) == [3 * 96 * 2 % 97]


def test_a_step_without_sampling_draws_nothing(engine):
    drawn = engine.step([SequenceStep([1], 0, [0], None), SequenceStep([2], 0, [1], GREEDY)], never)
    assert drawn == [None, 4]


def test_chunks_give_the_token_of_the_whole_prompt(engine):
    tokens = [(7 * i) % 97 for i in range(40)]
    whole = engine.step([SequenceStep(tokens, 0, [0, 1, 2], GREEDY)], never)
    engine.step([SequenceStep(tokens[:17], 0, [3, 4, 5], None)], never)
    assert engine.step([SequenceStep(tokens[17:], 17, [3, 4, 5], GREEDY)], never) == whole


def test_a_wrong_but_possible_byte_shows_as_a_wrong_token(engine, memory):
    engine.step([SequenceStep([1, 2, 3], 0, [0], None)], never)
    block = memory.block(0)
    for place in (slice(8, 16), slice(128 + 8, 128 + 16)):
        block[place] = bytes([40 + 1]) * 8
    assert engine.step([SequenceStep([5], 3, [0], GREEDY)], never) == [(40 + 3 + 5) * 2]


@pytest.mark.parametrize("place", [0, 7, 3 * 8 + 2, 128, 128 + 4 * 8 + 7])
def test_one_flipped_byte_anywhere_in_the_sequence_is_an_error(engine, memory, place):
    engine.step([SequenceStep(list(range(30)), 0, [0, 1], None)], never)
    memory.block(0)[place] ^= 1
    with pytest.raises(EngineError, match=r"KV of position \d+ in block 0 is no token's"):
        engine.step([SequenceStep([5], 30, [0, 1], GREEDY)], never)


def test_a_block_that_never_arrived_is_an_error(engine):
    engine.step([SequenceStep(list(range(48)), 0, [0, 1, 2], None)], never)
    with pytest.raises(EngineError, match="KV of position 16 in block 7"):
        engine.step([SequenceStep([5], 48, [0, 7, 2, 3], GREEDY)], never)


def test_a_block_is_zeroed_when_a_sequence_first_enters_it(engine, memory):
    memory.block(3)[:] = b"\xff" * FAKE_LAYOUT.block_bytes
    assert engine.step([SequenceStep([1], 0, [3], GREEDY)], never) == [2]
    assert bytes(memory.block(3))[8:128] == bytes(120)


def test_a_continuation_goes_on_with_the_same_tokens(memory):
    engine = FakeEngine(DECODE_FACTOR, memory)
    request = GenerateRequest("r", [3, 1, 4, 1, 5], 30, GREEDY)
    alone = generate_alone(engine, request, 16, range(8))
    for emitted in (1, 11, 12, 29):
        rest = generate_alone(engine, continue_request(request, alone[:emitted]), 16, range(8))
        assert alone[:emitted] + rest == alone


def test_a_stop_token_ends_the_stream_and_is_delivered(memory):
    request = GenerateRequest("r", [1, 1, 1], 30, GREEDY)
    alone = generate_alone(FakeEngine(DECODE_FACTOR, memory), request, 16, range(8))
    stopped = GenerateRequest("r", [1, 1, 1], 30, GREEDY, stop_token_ids=[alone[4]])
    end = alone.index(alone[4]) + 1
    assert generate_alone(FakeEngine(DECODE_FACTOR, memory), stopped, 16, range(8)) == alone[:end]


class VirtualClock:
    def __init__(self, cancelled_at_s: float) -> None:
        self.now_s = 0.0
        self.cancelled_at_s = cancelled_at_s
        self.longest_s = 0.0

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.longest_s = max(self.longest_s, duration_s)

    def is_cancelled(self) -> bool:
        return self.now_s >= self.cancelled_at_s


def test_delays_add_up_over_step_chunks_and_tokens(memory):
    clock = VirtualClock(cancelled_at_s=99.0)
    engine = FakeEngine(2, memory, step_s=0.1, chunk_s=0.02, prefill_token_s=0.001, sleep=clock.sleep)
    engine.step([SequenceStep([1], 0, [0], GREEDY)], clock.is_cancelled)
    assert clock.now_s == pytest.approx(0.1)
    engine.step([SequenceStep([1] * 30, 0, [0, 1], None), SequenceStep([1], 0, [2], GREEDY)], clock.is_cancelled)
    assert clock.now_s == pytest.approx(0.1 + 0.1 + 0.02 + 0.03)
    assert clock.longest_s <= 0.005


def test_a_cancelled_step_stops_within_a_slice_and_has_written_nothing(memory):
    clock = VirtualClock(cancelled_at_s=1.0)
    engine = FakeEngine(2, memory, step_s=30.0, sleep=clock.sleep)
    with pytest.raises(Cancelled):
        engine.step([SequenceStep([9, 9], 0, [0], GREEDY)], clock.is_cancelled)
    assert clock.now_s == pytest.approx(1.0, abs=0.006)
    assert bytes(memory.buffer) == bytes(len(memory.buffer))


def test_cancellation_is_seen_even_without_delays(engine):
    with pytest.raises(Cancelled):
        engine.step([SequenceStep([1], 0, [0], GREEDY)], lambda: True)


def test_another_numerics_id_refuses_to_pair(memory):
    ours, theirs = FakeEngine(2, memory), FakeEngine(3, memory, numerics="fake 2")
    check_pairing(ours.fingerprint, FakeEngine(3, memory).fingerprint)
    with pytest.raises(LayoutMismatch, match="ours 'fake 1', theirs 'fake 2'"):
        check_pairing(ours.fingerprint, theirs.fingerprint)


def test_memory_of_another_block_size_is_refused():
    with pytest.raises(EngineError, match="256 bytes, the pool has 100"):
        FakeEngine(2, ScratchMemory(4, 100))


def test_the_context_is_what_was_asked_for(memory):
    engine = FakeEngine(2, memory, context_tokens=20)
    with pytest.raises(EngineError, match="ends at position 21"):
        engine.step([SequenceStep([1] * 21, 0, [0, 1], GREEDY)], never)


def test_the_fake_does_not_import_torch():
    script = "import pd_engine.fake, pd_engine.reference, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
