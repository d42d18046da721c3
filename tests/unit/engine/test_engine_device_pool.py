"""A pool on a device, whose blocks come and go through slots of host memory. Here the device is the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import TINY_MANIFEST, engine_over, tiny_decoder, write_tiny_weights

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, EngineError
from pd_core.layout import BlockLayout, DType, Fingerprint
from pd_core.memory import BlockMemory
from pd_core.request import SamplingParams
from pd_engine.decoder import Decoder
from pd_engine.device import CPU
from pd_engine.device_copies import CudaCopies, HostCopies, copies_for, slots_like
from pd_engine.invariance import InvarianceProof, find_variance
from pd_engine.loader import torch_layout
from pd_engine.pool import DeviceKvPool, KvPool
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


class Staged:
    """An engine over a pool on a "device", and slots beside it, fewer than the pool has blocks."""

    def __init__(self, decoder: Decoder, dtype: DType, num_slots: int = 4) -> None:
        layout = torch_layout(decoder.manifest, dtype)
        self.memory = ScratchMemory(num_slots, layout.block_bytes)
        self.pool = DeviceKvPool(NUM_BLOCKS, layout, CPU)
        self.copies = copies_for(self.pool, self.memory)
        fingerprint = Fingerprint("tiny", "tiny", "tiny", "tiny", layout)
        proof = InvarianceProof("tiny", "tiny", [], "nothing was tried")
        self.engine = TorchEngine(decoder, self.pool, fingerprint, proof, 1)

    def taken_out(self, block_id: int, slot: int) -> bytes:
        self.copies.start_out([block_id], [slot]).wait()
        return bytes(self.memory.block(slot))


def test_blocks_copied_out_are_byte_for_byte_those_of_a_pool_in_memory(decoder: Decoder, dtype: DType) -> None:
    table = [3, 9, 1, 7, 20, 0, 12, 5, 6, 23]
    direct = engine_over(decoder, dtype, NUM_BLOCKS, 1)
    staged = Staged(decoder, dtype)
    expected = direct.logits([SequenceStep(PROMPT, 0, table, GREEDY)])
    assert np.array_equal(staged.engine.logits([SequenceStep(PROMPT, 0, table, GREEDY)]), expected)
    assert not any(staged.memory.buffer), "nothing is seen before it is copied"
    for place, block_id in enumerate(table):
        in_memory = direct._pool.blocks[block_id].view(torch.uint8).numpy().tobytes()
        assert staged.taken_out(block_id, place % 4) == in_memory


def test_a_prompt_whose_blocks_were_copied_in_goes_on_with_the_same_bits(decoder: Decoder, dtype: DType) -> None:
    """Prefill on one device, decode on another, and between them nothing but a few slots."""
    prefill, decode = Staged(decoder, dtype), Staged(decoder, dtype)
    theirs, ours = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20], [11, 10, 9, 8, 7, 6, 5, 4, 3, 2]
    whole = prefill.engine.logits([SequenceStep(PROMPT, 0, theirs, GREEDY)])
    (first,) = prefill.engine.step([SequenceStep(PROMPT[-1:], len(PROMPT) - 1, theirs, GREEDY)], never)
    for sent, taken in zip(theirs, ours, strict=True):
        decode.memory.block(3)[:] = prefill.taken_out(sent, 1)
        decode.copies.start_in([3], [taken]).wait()
    again = decode.engine.logits([SequenceStep(PROMPT[-1:], len(PROMPT) - 1, ours, GREEDY)])
    assert again.tobytes() == whole.tobytes()
    assert first is not None
    for position in range(len(PROMPT), len(PROMPT) + 9):
        one = prefill.engine.logits([SequenceStep([first], position, theirs, GREEDY)])
        two = decode.engine.logits([SequenceStep([first], position, ours, GREEDY)])
        assert one.tobytes() == two.tobytes()
        first = int(one.argmax())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_copied_each_way_each_place_is_as_its_last_writer_left_it(data: st.DataObject) -> None:
    layout = torch_layout(TINY_MANIFEST, "float32")
    num_blocks, num_slots = 7, 5
    memory = ScratchMemory(num_slots, layout.block_bytes)
    pool = DeviceKvPool(num_blocks, layout, CPU)
    copies = copies_for(pool, memory)
    on_device, in_memory = [0] * num_blocks, [0] * num_slots
    for turn in range(1, data.draw(st.integers(1, 8)) + 1):
        num = data.draw(st.integers(0, num_slots))
        blocks = data.draw(st.permutations(range(num_blocks)))[:num]
        slots = data.draw(st.permutations(range(num_slots)))[:num]
        match data.draw(st.sampled_from(["steps", "transport", "out", "in"])):
            case "steps":
                for block_id in blocks:
                    pool.blocks[block_id].fill_(turn)
                    on_device[block_id] = turn
            case "transport":
                for slot in slots:
                    memory.block(slot)[:] = np.full(layout.block_bytes // 4, turn, np.float32).tobytes()
                    in_memory[slot] = turn
            case "out":
                copies.start_out(blocks, slots).wait()
                for block_id, slot in zip(blocks, slots, strict=True):
                    in_memory[slot] = on_device[block_id]
            case "in":
                copies.start_in(slots, blocks).wait()
                for block_id, slot in zip(blocks, slots, strict=True):
                    on_device[block_id] = in_memory[slot]
    seen = np.frombuffer(memory.buffer, np.float32).reshape(num_slots, -1)
    assert (seen == np.array(in_memory)[:, None]).all()
    assert (pool.blocks.numpy() == np.array(on_device)[:, None]).all()


def test_slots_of_another_size_than_the_pools_blocks_are_refused() -> None:
    layout = torch_layout(TINY_MANIFEST, "float32")
    pool = DeviceKvPool(2, layout, CPU)
    with pytest.raises(EngineError, match=f"a block is {layout.block_bytes} bytes, a slot of the ring has 64"):
        slots_like(pool, ScratchMemory(2, 64))


def test_copies_that_are_closed_hold_no_memory() -> None:
    layout = torch_layout(TINY_MANIFEST, "float32")
    memory = ScratchMemory(2, layout.block_bytes)
    copies = copies_for(DeviceKvPool(2, layout, CPU), memory)
    assert isinstance(copies, HostCopies)
    copies.close()
    memory._buffer.release()  # raises BufferError while a view of it is left


def test_the_check_at_start_holds_on_a_pool_elsewhere(decoder: Decoder, dtype: DType) -> None:
    """It copies blocks in the memory between two steps: without copies to the pool and back it would see zeros."""
    layout = torch_layout(TINY_MANIFEST, dtype)

    def make_pool(memory: BlockMemory, layout: BlockLayout) -> KvPool:
        return DeviceKvPool(memory.num_blocks, layout, CPU)

    assert find_variance(ShallowDecoder(decoder, layout, make_pool), [1]) is None


def test_a_step_that_is_cancelled_leaves_nothing_running_on_the_device(
    decoder: Decoder, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = Staged(decoder, dtype)
    settled: list[str] = []
    monkeypatch.setattr(staged.pool, "settle", lambda: settled.append("settled"))
    with pytest.raises(Cancelled):
        staged.engine.step([SequenceStep(PROMPT[:20], 0, [0, 1], None)], lambda: True)
    staged.engine.step([SequenceStep(PROMPT[:20], 0, [0, 1], None)], never)
    assert settled == ["settled", "settled"]


def test_a_device_without_room_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = torch_layout(TINY_MANIFEST, "float32")

    def no_room(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", no_room)
    with pytest.raises(EngineError, match=r"a pool of .* MiB has no room on cpu: CUDA out of memory"):
        DeviceKvPool(2, layout, CPU)


class FakeCuda:
    """As much of torch.cuda as copies use, over tensors of the CPU: notes what is asked of it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.code = 0
        self.failure: RuntimeError | None = None
        cuda = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = f"stream {sum(call.startswith('new stream') for call in cuda.calls)}"
                cuda.calls.append(f"new {self.name}")

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                cuda.calls.append(f"record on {stream.name}")

            def synchronize(self) -> None:
                cuda.calls.append("wait")
                if cuda.failure is not None:
                    raise cuda.failure

        @contextmanager
        def on_stream(stream: Stream) -> Iterator[None]:
            cuda.calls.append(f"on {stream.name}")
            yield

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", on_stream)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(f"pin {num_bytes}")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append("unpin")
        return self.code


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_copies_on_cuda_go_on_a_stream_for_each_direction_and_are_waited_for_by_event(cuda: FakeCuda) -> None:
    blocks, slots = torch.arange(12.0).view(3, 4), torch.zeros(2, 4)
    copies = CudaCopies(blocks, slots)
    out = copies.start_out([2, 0], [0, 1])
    back = copies.start_in([1], [2])
    assert cuda.calls[:3] == ["new stream 0", "new stream 1", "pin 32"]
    assert cuda.calls[3:] == ["on stream 0", "record on stream 0", "on stream 1", "record on stream 1"]
    out.wait()
    back.wait()
    copies.close()
    assert cuda.calls[7:] == ["wait", "wait", "unpin"]
    assert slots.tolist() == [[8.0, 9.0, 10.0, 11.0], [0.0, 1.0, 2.0, 3.0]]
    assert blocks[2].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_cuda_refuses_is_an_engine_error(cuda: FakeCuda) -> None:
    blocks, slots = torch.zeros(3, 4), torch.zeros(2, 4)
    copies = CudaCopies(blocks, slots)
    cuda.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(EngineError, match="a copy failed: CUDA error: an illegal"):
        copies.start_out([0], [0]).wait()
    cuda.code = 700
    with pytest.raises(EngineError, match="cannot be unpinned: CUDA error 700"):
        copies.close()
    with pytest.raises(EngineError, match="0 MiB of the ring cannot be pinned: CUDA error 700"):
        CudaCopies(blocks, slots)
