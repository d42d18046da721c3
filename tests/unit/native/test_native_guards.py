"""What the native model refuses, that it writes nothing then, and that it stops when asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import SMALL, Memory, random_llama, random_tokens

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, EngineError, ModelError
from pd_engine.native.library import Library
from pd_engine.native.model import NativeModel, _c_spec
from pd_engine.native.spec import NativeSpec
from pd_engine.steps import never

TOKENS = random_tokens(SMALL, 40)


@pytest.fixture(scope="module")
def model(library: Library) -> NativeModel:
    return random_llama(SMALL).native(library, library.variants("float32")[0])


def step_of(
    tokens: list[int] | None = None, start: int = 0, block_ids: list[int] | None = None
) -> tuple[list[int], int, list[int]]:
    return TOKENS if tokens is None else tokens, start, [2, 0, 1] if block_ids is None else block_ids


@pytest.mark.parametrize(
    ("step", "selected", "words"),
    [
        (step_of(tokens=[5, 103]), [0], "id 103 is outside the vocabulary"),
        (step_of(tokens=[5, -1]), [0], "id -1 is outside the vocabulary"),
        (step_of(tokens=[2**40]), [0], "more than 32 bits"),
        (step_of(tokens=[]), [], "0 rows"),
        (step_of(start=-1), [0], "positions -1"),
        (step_of(start=2030), [0], "the context has 2048"),
        (step_of(start=9), [0], "needs 4 blocks, its table has 3"),
        (step_of(block_ids=[2, 0]), [0], "needs 3 blocks, its table has 2"),
        (step_of(block_ids=[2, 0, 4]), [0], "block 4 is outside the pool of 4"),
        (step_of(block_ids=[2, -1, 1]), [0], "block -1 is outside the pool"),
        (step_of(), [40], "none of the step's"),
        (step_of(), [-1], "none of the step's"),
        (step_of(start=2**31 - 1), [0], "positions"),
    ],
)
def test_numbers_out_of_bounds_are_refused_before_anything_is_written(
    model: NativeModel, step: tuple[list[int], int, list[int]], selected: list[int], words: str
) -> None:
    memory = Memory(4, SMALL.layout)
    tokens, start, block_ids = step
    with pytest.raises(EngineError, match=words):
        model.forward_rows([tokens], [start], [block_ids], selected, memory, never)
    assert bytes(memory.buffer) == b"\xff" * len(memory.buffer)


def test_the_faulty_sequence_is_named(model: NativeModel) -> None:
    steps = [SequenceStep([1], 0, [0], None), SequenceStep([2], 0, [9], None)]
    with pytest.raises(EngineError, match="sequence 1: block 9"):
        model.forward(steps, [0], Memory(4, SMALL.layout), never)


def test_a_pool_of_another_layout_is_refused(model: NativeModel) -> None:
    memory = Memory(4, replace(SMALL, num_layers=2).layout)
    with pytest.raises(EngineError, match="a block is"):
        model.forward([SequenceStep([1], 0, [0], None)], [0], memory, never)


def test_a_read_only_pool_is_refused(model: NativeModel) -> None:
    class ReadOnly(Memory):
        @property
        def buffer(self) -> memoryview:
            return super().buffer.toreadonly()

    memory = ReadOnly(4, SMALL.layout)
    with pytest.raises(EngineError, match="writable"):
        model.forward([SequenceStep([1], 0, [0], None)], [0], memory, never)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"head_dim": 40}, "head_dim that is a multiple of 16; it is 40"),
        ({"head_dim": 272}, "up to a head_dim of 256; it is 272"),
        ({"hidden_size": 72}, "hidden_size that is a multiple of 16"),
        ({"intermediate_size": 100}, "intermediate_size that is a multiple of 16"),
        ({"num_heads": 514, "num_kv_heads": 2}, "256 heads share a KV head; here 257"),
        ({"dtype": "uint8"}, "not in uint8"),
    ],
)
def test_sizes_without_kernels_are_refused_by_name(library: Library, sizes: dict[str, Any], words: str) -> None:
    spec = replace(SMALL, **sizes)
    refusal = spec.refusal()
    assert refusal is not None
    assert words in refusal
    with pytest.raises(EngineError, match=words):
        NativeModel(library, spec, {}, (np.zeros((1, 1), np.float32),) * 2, num_threads=1)


def test_the_library_itself_checks_sizes_too(library: Library) -> None:
    spec = _c_spec(SMALL)
    spec.head_dim = 40
    with pytest.raises(EngineError, match="head_dim is 40; it must be a multiple of 16 from 16 to 256"):
        library.create(spec, library.variants("float32")[0], 1)


@pytest.mark.parametrize("num_threads", [0, -1, 5000])
def test_a_senseless_number_of_threads_is_refused(library: Library, num_threads: int) -> None:
    with pytest.raises(EngineError, match="threads"):
        random_llama(SMALL).native(library, library.variants("float32")[0], num_threads)


def test_an_unknown_variant_is_refused_with_those_there_are(library: Library) -> None:
    with pytest.raises(EngineError, match=r"'neon'.*" + library.variants("float32")[0]):
        random_llama(SMALL).native(library, "neon")


def test_missing_and_misshapen_weights_are_named(library: Library) -> None:
    llama = random_llama(SMALL)
    variant = library.variants("float32")[0]
    name = "model.layers.1.mlp.up_proj.weight"
    kept = llama.tensors.pop(name)
    with pytest.raises(ModelError, match=name):
        llama.native(library, variant)
    llama.tensors[name] = kept[:-1]
    with pytest.raises(ModelError, match=r"is \[111, 80\]; the manifest says \[112, 80\]"):
        llama.native(library, variant)


def test_arrays_serve_as_well_as_tensors(library: Library) -> None:
    for dtype in ("float32", "bfloat16"):
        llama = random_llama(replace(SMALL, dtype=dtype))
        variant = library.variants(dtype)[0]
        arrays = {
            name: (t if dtype == "float32" else t.view(torch.uint16)).numpy() for name, t in llama.tensors.items()
        }
        results = []
        for tensors in (llama.tensors, arrays):
            model = NativeModel(library, llama.spec, tensors, llama.rotary, num_threads=1, variant=variant)
            step = SequenceStep(TOKENS, 0, [0, 1, 2], None)
            results.append(model.forward([step], [0], Memory(3, llama.spec.layout), never).tobytes())
        assert results[0] == results[1]


def test_nothing_of_an_earlier_request_is_read_where_the_pool_is_full_of_nan(model: NativeModel) -> None:
    memory = Memory(4, SMALL.layout)  # every bit set: NaN in both dtypes
    first = model.forward([SequenceStep(TOKENS, 0, [3, 1, 0], None)], [0], memory, never)
    assert np.isfinite(first).all()
    memory.buffer[:] = b"\xff" * len(memory.buffer)
    model.forward([SequenceStep(TOKENS[:20], 0, [0, 2, 1], None)], [], memory, never)
    again = model.forward([SequenceStep(TOKENS[20:], 20, [0, 2, 1], None)], [0], memory, never)
    assert again.tobytes() == first.tobytes()


def test_unused_slots_of_a_block_that_is_entered_are_zero_and_other_blocks_are_left_alone(model: NativeModel) -> None:
    memory = Memory(4, SMALL.layout)
    model.forward([SequenceStep(TOKENS[:17], 0, [3, 1], None)], [], memory, never)
    block = np.frombuffer(memory.block(1), np.float32).reshape(SMALL.num_layers * SMALL.num_kv_heads, 2, -1)
    keys, values = block[:, 0].reshape(-1, SMALL.head_dim, 16), block[:, 1].reshape(-1, 16, SMALL.head_dim)
    assert np.all(keys[:, :, 1:] == 0)
    assert np.all(values[:, 1:] == 0)
    assert np.all(keys[:, :, 0] != 0)
    for untouched in (0, 2):
        assert bytes(memory.block(untouched)) == b"\xff" * memory.block_bytes


def test_a_step_without_selected_rows_writes_kv_and_gives_no_logits(model: NativeModel) -> None:
    with_logits, without = Memory(3, SMALL.layout), Memory(3, SMALL.layout)
    step = SequenceStep(TOKENS, 0, [0, 1, 2], None)
    model.forward([step], [0], with_logits, never)
    assert model.forward([step], [], without, never).shape == (0, SMALL.vocab_size)
    assert bytes(with_logits.buffer) == bytes(without.buffer)


class Answers:
    """Says no so many times, then yes."""

    def __init__(self, num_no: int) -> None:
        self.left = num_no
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("num_no", range(1 + SMALL.num_layers))
def test_a_step_can_be_stopped_before_every_layer_and_run_again(model: NativeModel, num_no: int) -> None:
    memory = Memory(4, SMALL.layout)
    step = SequenceStep(TOKENS, 0, [3, 1, 0], None)
    answers = Answers(num_no)
    with pytest.raises(Cancelled):
        model.forward([step], [0], memory, answers, stop_interval_s=0.0)
    assert answers.asked == num_no + 1
    again = model.forward([step], [0], memory, never)
    assert again.tobytes() == model.forward([step], [0], Memory(4, SMALL.layout), never).tobytes()


def test_a_short_step_is_asked_for_once(model: NativeModel) -> None:
    answers = Answers(100)
    model.forward([SequenceStep(TOKENS[:1], 0, [0], None)], [0], Memory(1, SMALL.layout), answers, stop_interval_s=60.0)
    assert answers.asked == 1


def test_what_the_question_raises_comes_out_of_the_step(model: NativeModel) -> None:
    asked = []

    def broken() -> bool:
        asked.append(1)
        if len(asked) > 1:
            raise ZeroDivisionError("in the question")
        return False

    with pytest.raises(ZeroDivisionError, match="in the question"):
        model.forward([SequenceStep([1], 0, [0], None)], [0], Memory(1, SMALL.layout), broken, stop_interval_s=0.0)


def test_a_second_caller_is_refused_while_a_step_runs(model: NativeModel) -> None:
    refused: list[str] = []

    def call_again() -> None:
        try:
            model.forward([SequenceStep([1], 0, [0], None)], [0], Memory(1, SMALL.layout), never)
        except EngineError as error:
            refused.append(error.message)

    def during() -> bool:
        thread = threading.Thread(target=call_again)
        thread.start()
        thread.join(timeout=10)
        with pytest.raises(EngineError, match="running"):
            model.close()
        return False

    asked_outside: list[Callable[[], bool]] = [never]

    def question() -> bool:
        return asked_outside.pop()() if asked_outside else during()

    model.forward([SequenceStep([1], 0, [0], None)], [0], Memory(1, SMALL.layout), question, stop_interval_s=0.0)
    assert refused
    assert all("another step is running" in message for message in refused)


def test_a_closed_model_says_so(library: Library) -> None:
    spec: NativeSpec = replace(SMALL, num_layers=1)
    model = random_llama(spec).native(library, library.variants("float32")[0])
    model.close()
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.forward([SequenceStep([1], 0, [0], None)], [0], Memory(1, spec.layout), never)
