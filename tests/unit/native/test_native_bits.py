"""A row's bits depend on its own sequence alone: logits and KV, over every way of running the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import SMALL, Llama, Memory, random_llama, random_tokens, tables_for, with_dtype
from native_trials import NUM_TOKENS, Trial, forever

from pd_core.engine import SequenceStep
from pd_core.layout import DType
from pd_engine.native.library import Library
from pd_engine.native.model import NativeModel
from pd_engine.steps import never

SPEC = replace(SMALL, num_layers=2, hidden_size=48, intermediate_size=64, num_heads=3, num_kv_heads=1)


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str, int], NativeModel]:
    return {}


@pytest.fixture
def model(library: Library, variant: str, dtype: DType, models: dict[tuple[str, str, int], NativeModel]) -> NativeModel:
    return _model(library, variant, dtype, 2, models)


def _model(
    library: Library, variant: str, dtype: DType, threads: int, models: dict[tuple[str, str, int], NativeModel]
) -> NativeModel:
    key = (variant, dtype, threads)
    if key not in models:
        models[key] = _llama(dtype).native(library, variant, threads)
    return models[key]


def _llama(dtype: DType) -> Llama:
    return random_llama(with_dtype(SPEC, dtype))


@pytest.mark.parametrize(
    "sizes",
    [(512,), (256,), (64,), (37,), (16,), (7,), (4, 1, 33), (1,), (1000, 1)],
    ids=lambda s: "+".join(map(str, s)),
)
def test_chunks_do_not_show(model: NativeModel, sizes: tuple[int, ...]) -> None:
    whole, parts = Trial(model), Trial(model)
    expected = whole.run(0, NUM_TOKENS, [NUM_TOKENS - 1])
    assert parts.run_chunks(forever(*sizes)).tobytes() == expected.tobytes()
    assert parts.kv() == whole.kv()


def test_threads_do_not_show(
    library: Library, variant: str, dtype: DType, models: dict[tuple[str, str, int], NativeModel]
) -> None:
    trials = [Trial(_model(library, variant, dtype, threads, models)) for threads in (1, 2, 3, 7)]
    chunks = [trial.run_chunks(forever(500, 33, 1)).tobytes() for trial in trials]
    assert len(set(chunks)) == 1
    assert len({trial.kv() for trial in trials}) == 1


def test_every_row_of_a_prompt_has_the_logits_it_has_alone(model: NativeModel) -> None:
    trial = Trial(model, 600)
    rows = [0, 1, 15, 16, 63, 64, 65, 500, 511, 512, 513, 599]
    together = trial.run(0, 600, rows)
    for row, logits in zip(rows, together, strict=True):
        alone = Trial(model, 600)
        if row:
            alone.run(0, row)
        assert alone.run(row, row + 1, [row]).tobytes() == logits.tobytes()


def test_a_selected_row_may_come_twice_and_in_any_order(model: NativeModel) -> None:
    trial = Trial(model, 40)
    logits = trial.run(0, 40, [39, 3, 39, 0])
    again = trial.run(0, 40, [0, 3, 39])
    assert logits[0].tobytes() == logits[2].tobytes() == again[2].tobytes()
    assert logits[1].tobytes() == again[1].tobytes()
    assert logits[3].tobytes() == again[0].tobytes()


def test_decode_gives_the_kv_and_logits_that_prefill_gives(model: NativeModel) -> None:
    decoded, prefilled = Trial(model, 600), Trial(model, 600)
    decoded.run(0, 490)
    steps = [decoded.run(position, position + 1, [position]) for position in range(490, 600)]
    expected = prefilled.run(0, 600, range(490, 600))
    assert np.concatenate(steps).tobytes() == expected.tobytes()
    assert decoded.kv() == prefilled.kv()


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 12, 13, 16])
def test_a_batch_of_streams_gives_each_what_it_gets_alone(model: NativeModel, batch: int) -> None:
    lengths = [(5, 16, 63, 64, 65, 130, 511, 512, 513, 530, 1, 2, 15, 17, 600, 33)[i] for i in range(batch)]
    prompts = [random_tokens(model.spec, length + 3, seed=i) for i, length in enumerate(lengths)]
    tables, num_blocks = tables_for([length + 3 for length in lengths])
    memory = Memory(num_blocks, model.spec.layout)
    for prompt, table, length in zip(prompts, tables, lengths, strict=True):
        model.forward([SequenceStep(prompt[:length], 0, table, None)], [], memory, never)
    together = []
    for i in range(3):
        steps = [
            SequenceStep(prompt[length + i : length + i + 1], length + i, table, None)
            for prompt, table, length in zip(prompts, tables, lengths, strict=True)
        ]
        together.append(model.forward(steps, range(batch), memory, never))
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        (table,), num_blocks = tables_for([length + 3])
        alone = model.forward_rows(
            [prompt], [0], [table], range(length, length + 3), Memory(num_blocks, model.spec.layout), never
        )
        assert alone.tobytes() == np.stack([logits[number] for logits in together]).tobytes()


def test_chunks_and_decode_rows_share_a_step(model: NativeModel) -> None:
    lengths = [700, 40, 513, 64]
    prompts = [random_tokens(model.spec, length, seed=i) for i, length in enumerate(lengths)]
    tables, num_blocks = tables_for(lengths)
    memory = Memory(num_blocks, model.spec.layout)
    starts = [650, 0, 512, 63]
    for prompt, table, start in zip(prompts, tables, starts, strict=True):
        if start:
            model.forward([SequenceStep(prompt[:start], 0, table, None)], [], memory, never)
    steps = [
        SequenceStep(prompt[start:], start, table, None)
        for prompt, table, start in zip(prompts, tables, starts, strict=True)
    ]
    mixed = model.forward(steps, range(4), memory, never)
    for number, prompt in enumerate(prompts):
        (table,), num_blocks = tables_for([len(prompt)])
        alone = Memory(num_blocks, model.spec.layout)
        logits = model.forward([SequenceStep(prompt, 0, table, None)], [0], alone, never)
        assert logits.tobytes() == mixed[number : number + 1].tobytes()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_schedule_of_three_sequences_gives_the_same_bits(library: Library, data: st.DataObject) -> None:
    """Steps of any sequences with any number of tokens, in any order, on the best variant."""
    dtype = data.draw(st.sampled_from(("float32", "bfloat16")))
    model = _model(library, library.variants(dtype)[0], dtype, data.draw(st.sampled_from((1, 2))), _KEPT)
    lengths = [80, 530, 33]
    prompts = [random_tokens(model.spec, length, seed=i) for i, length in enumerate(lengths)]
    tables, num_blocks = tables_for(lengths, seed=data.draw(st.integers(0, 5)))
    memory = Memory(num_blocks, model.spec.layout)
    done = [0, 0, 0]
    last: list[bytes] = [b"", b"", b""]
    while done != lengths:
        open_ = [i for i in range(3) if done[i] < lengths[i]]
        chosen = data.draw(st.lists(st.sampled_from(open_), min_size=1, unique=True))
        ends = [min(lengths[i], done[i] + data.draw(st.sampled_from((1, 2, 15, 16, 17, 64, 200)))) for i in chosen]
        steps = [
            SequenceStep(prompts[i][done[i] : end], done[i], tables[i], None)
            for i, end in zip(chosen, ends, strict=True)
        ]
        logits = model.forward(steps, range(len(steps)), memory, never)
        for i, end, row in zip(chosen, ends, logits, strict=True):
            done[i], last[i] = end, row.tobytes()
    for i, prompt in enumerate(prompts):
        (table,), num_blocks = tables_for([len(prompt)])
        alone = Memory(num_blocks, model.spec.layout)
        step = SequenceStep(prompt, 0, table, None)
        assert model.forward([step], [0], alone, never).tobytes() == last[i]


_KEPT: dict[tuple[str, str, int], NativeModel] = {}
