"""A pool on a device, with the worker's memory as its staging. Here the device is the CPU: all of it is tried."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import TINY_MANIFEST, engine_over, tiny_decoder, write_tiny_weights

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import DType, Fingerprint
from pd_core.request import SamplingParams
from pd_engine.decoder import Decoder
from pd_engine.device import CPU
from pd_engine.invariance import InvarianceProof, find_variance
from pd_engine.loader import torch_layout
from pd_engine.pool import COPIED_BLOCKS, KvPool, StagedKvPool, pool_on
from pd_engine.scratch import ScratchMemory
from pd_engine.shallow_decoder import ShallowDecoder
from pd_engine.steps import never
from pd_engine.torch_engine import TorchEngine

GREEDY = SamplingParams()
PROMPT = [(13 * i + 5) % TINY_MANIFEST.vocab_size for i in range(150)]
NUM_BLOCKS = 24


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> DType:
    found: DType = request.param
    return found


@pytest.fixture
def decoder(tmp_path: Path, dtype: DType) -> Decoder:
    write_tiny_weights(tmp_path / "w.safetensors", TINY_MANIFEST, seed=1)
    return tiny_decoder(tmp_path / "w.safetensors", TINY_MANIFEST, dtype, "sdpa")


def staged(decoder: Decoder, dtype: DType) -> tuple[TorchEngine, ScratchMemory]:
    layout = torch_layout(decoder.manifest, dtype)
    memory = ScratchMemory(NUM_BLOCKS, layout.block_bytes)
    pool = StagedKvPool(memory, layout, CPU)
    fingerprint = Fingerprint("tiny", "tiny", "tiny", "tiny", layout)
    proof = InvarianceProof("tiny", "tiny", [], "nothing was tried")
    return TorchEngine(decoder, pool, fingerprint, proof, 1), memory


def test_published_blocks_are_byte_for_byte_those_of_a_pool_that_is_the_memory(decoder: Decoder, dtype: DType) -> None:
    table = [3, 9, 1, 7, 20, 0, 12, 5, 6, 23]
    direct = engine_over(decoder, dtype, NUM_BLOCKS, 1)
    engine, memory = staged(decoder, dtype)
    expected = direct.logits([SequenceStep(PROMPT, 0, table, GREEDY)])
    assert np.array_equal(engine.logits([SequenceStep(PROMPT, 0, table, GREEDY)]), expected)
    assert not any(memory.buffer), "nothing is seen before it is published"
    engine.publish(table[:4])
    assert bytes(memory.block(9)) == bytes(direct._pool.blocks[9].view(torch.uint8).numpy())
    assert not any(memory.block(20))
    engine.publish(table)
    assert bytes(memory.buffer) == direct._pool.blocks.view(torch.uint8).numpy().tobytes()


def test_a_prompt_whose_blocks_were_adopted_goes_on_with_the_same_bits(decoder: Decoder, dtype: DType) -> None:
    """Prefill on one device, decode on another, and between them nothing but bytes of memory."""
    prefill, source = staged(decoder, dtype)
    decode, target = staged(decoder, dtype)
    theirs, ours = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20], [11, 10, 9, 8, 7, 6, 5, 4, 3, 2]
    whole = prefill.logits([SequenceStep(PROMPT, 0, theirs, GREEDY)])
    (first,) = prefill.step([SequenceStep(PROMPT[-1:], len(PROMPT) - 1, theirs, GREEDY)], never)
    prefill.publish(theirs)
    for sent, taken in zip(theirs, ours, strict=True):
        target.block(taken)[:] = source.block(sent)
    decode.adopt(ours)
    assert decode.logits([SequenceStep(PROMPT[-1:], len(PROMPT) - 1, ours, GREEDY)]).tobytes() == whole.tobytes()
    assert first is not None
    for position in range(len(PROMPT), len(PROMPT) + 9):
        one = prefill.logits([SequenceStep([first], position, theirs, GREEDY)])
        two = decode.logits([SequenceStep([first], position, ours, GREEDY)])
        assert one.tobytes() == two.tobytes()
        first = int(one.argmax())


def test_blocks_that_were_not_adopted_are_not_seen(decoder: Decoder, dtype: DType) -> None:
    engine, memory = staged(decoder, dtype)
    before = engine.logits([SequenceStep(PROMPT[:20], 0, [0, 1], GREEDY)])
    memory.block(0)[:] = b"\xff" * memory.block_bytes
    assert np.array_equal(engine.logits([SequenceStep(PROMPT[19:20], 19, [0, 1], GREEDY)]), before)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_published_and_adopted_in_any_order_each_block_is_as_its_last_writer_left_it(
    data: st.DataObject,
) -> None:
    layout = torch_layout(TINY_MANIFEST, "float32")
    num_blocks = 3 * COPIED_BLOCKS // 2
    memory = ScratchMemory(num_blocks, layout.block_bytes)
    pool = StagedKvPool(memory, layout, CPU)
    on_device, in_memory = [0] * num_blocks, [0] * num_blocks
    ids = st.lists(st.integers(0, num_blocks - 1), unique=True, max_size=num_blocks)
    for turn in range(1, data.draw(st.integers(1, 8)) + 1):
        chosen = data.draw(ids)
        match data.draw(st.sampled_from(["steps", "transport", "publish", "adopt"])):
            case "steps":
                for block_id in chosen:
                    pool.blocks[block_id].fill_(turn)
                    on_device[block_id] = turn
            case "transport":
                for block_id in chosen:
                    memory.block(block_id)[:] = np.full(layout.block_bytes // 4, turn, np.float32).tobytes()
                    in_memory[block_id] = turn
            case "publish":
                pool.publish(chosen)
                for block_id in chosen:
                    in_memory[block_id] = on_device[block_id]
            case "adopt":
                pool.adopt(chosen)
                for block_id in chosen:
                    on_device[block_id] = in_memory[block_id]
    seen = np.frombuffer(memory.buffer, np.float32).reshape(num_blocks, -1)
    assert (seen == np.array(in_memory)[:, None]).all()
    assert (pool.blocks.numpy() == np.array(on_device)[:, None]).all()


@pytest.mark.parametrize("block_ids", [[0, NUM_BLOCKS], [-1], [3, 10**9]])
def test_a_block_outside_the_pool_is_refused_before_any_is_copied(
    decoder: Decoder, dtype: DType, block_ids: list[int]
) -> None:
    engine, memory = staged(decoder, dtype)
    engine.step([SequenceStep(PROMPT[:64], 0, [0, 1, 2, 3], None)], never)
    with pytest.raises(EngineError, match=f"block .* is outside the pool of {NUM_BLOCKS}"):
        engine.publish(block_ids)
    with pytest.raises(EngineError, match="outside the pool"):
        engine.adopt(block_ids)
    assert not any(memory.buffer)


def test_an_engine_on_the_memory_itself_has_nothing_to_copy(decoder: Decoder, dtype: DType) -> None:
    engine = engine_over(decoder, dtype, NUM_BLOCKS, 1)
    assert type(engine._pool) is KvPool
    engine.step([SequenceStep(PROMPT[:20], 0, [4, 5], None)], never)
    before = engine._pool.blocks.clone()
    engine.publish([4, 5])
    engine.adopt([4, 5])
    assert torch.equal(engine._pool.blocks, before)


def test_the_check_at_start_holds_through_a_staged_pool(decoder: Decoder, dtype: DType) -> None:
    """It copies blocks in the memory between two steps: without publish and adopt it would see zeros and fail."""
    layout = torch_layout(TINY_MANIFEST, dtype)
    assert find_variance(ShallowDecoder(decoder, layout, partial(StagedKvPool, device=CPU)), [1]) is None


def test_the_cpu_works_in_the_memory_and_other_devices_are_staged() -> None:
    layout = torch_layout(TINY_MANIFEST, "float32")
    memory = ScratchMemory(2, layout.block_bytes)
    assert type(pool_on(memory, layout, CPU)) is KvPool
    assert type(pool_on(memory, layout, torch.device("meta"))) is StagedKvPool


def test_a_device_without_room_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = torch_layout(TINY_MANIFEST, "float32")

    def no_room(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", no_room)
    with pytest.raises(EngineError, match=r"a pool of .* MiB has no room on cpu: CUDA out of memory"):
        StagedKvPool(ScratchMemory(2, layout.block_bytes), layout, CPU)
