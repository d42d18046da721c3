"""Weights in 8 bits: what the quantiser gives, and that the kernels multiply with exactly that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from native_models import (
    SMALL,
    Llama,
    Memory,
    random_llama,
    random_tokens,
    reference_logits,
    tables_for,
    with_dtype,
)
from native_trials import NUM_TOKENS, Trial, forever

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError, ModelError
from pd_core.layout import DType
from pd_engine.native.library import Library
from pd_engine.native.model import NativeModel
from pd_engine.native.numerics import numerics_id
from pd_engine.native.quantise import MOST, quantise_rows
from pd_engine.steps import never

EMBEDDING = "model.embed_tokens.weight"
SPEC = replace(SMALL, num_layers=2, hidden_size=48, intermediate_size=64, num_heads=3, num_kv_heads=1)

# As for weights of the dtype: beside the reference with the very same 8-bit numbers nothing else is lost.
TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 4e-2}


def matrices(shape: tuple[int, int] = (5, 16)) -> st.SearchStrategy[np.ndarray]:
    return arrays.arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32))


@given(matrices())
def test_a_weight_is_off_by_half_a_step_at_most_and_the_largest_of_a_row_has_the_largest_number(
    weights: np.ndarray,
) -> None:
    rows = quantise_rows(weights, "w")
    assert np.abs(rows.numbers).max(initial=0) <= MOST
    wide, scales = weights.astype(np.float64), rows.scales.astype(np.float64)[:, None]
    assert np.all(np.abs(rows.numbers * scales - wide) <= scales * (0.5 + 1e-5))
    for row, numbers in zip(weights, rows.numbers, strict=True):
        if np.abs(row).max() > 1e-30:
            assert np.abs(numbers).max() == MOST


@given(matrices())
def test_signs_do_not_matter_and_rows_know_nothing_of_each_other(weights: np.ndarray) -> None:
    rows, negative = quantise_rows(weights, "w"), quantise_rows(-weights, "w")
    assert np.array_equal(negative.numbers, -rows.numbers)
    assert np.array_equal(negative.scales, rows.scales)
    for i in range(len(weights)):
        alone = quantise_rows(weights[i : i + 1], "w")
        assert np.array_equal(alone.numbers[0], rows.numbers[i])
        assert alone.scales[0] == rows.scales[i]


def test_a_row_of_zeros_or_of_numbers_next_to_zero_stays_finite() -> None:
    weights = np.array([[0.0, 0.0], [1e-45, -1e-45], [1.0, 0.0]], dtype=np.float32)
    rows = quantise_rows(weights, "w")
    assert rows.numbers.tolist() == [[0, 0], [0, 0], [MOST, 0]]
    assert np.isfinite(rows.scales).all()
    assert (rows.scales > 0).all()


def test_bfloat16_is_quantised_as_the_float32_that_it_is() -> None:
    weights = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    narrow = quantise_rows(weights.view(torch.uint16).numpy(), "w")
    wide = quantise_rows(weights.float().numpy(), "w")
    assert np.array_equal(narrow.numbers, wide.numbers)
    assert np.array_equal(narrow.scales, wide.scales)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(number: float) -> None:
    with pytest.raises(ModelError, match=r"layers\.3\.q_proj has numbers that are not finite"):
        quantise_rows(np.array([[1.0, number]], np.float32), "layers.3.q_proj")


def dequantised(llama: Llama) -> Llama:
    """The model that the kernels run: the embedding is looked up as it is, and tied to it is a head in 8 bits."""
    tensors = {name: tensor.float() for name, tensor in llama.tensors.items()}
    if llama.spec.tied_embeddings:
        tensors["lm_head.weight"] = tensors[EMBEDDING]
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name != EMBEDDING:
            rows = quantise_rows(tensor.numpy(), name)
            tensors[name] = torch.from_numpy(rows.numbers * rows.scales.astype(np.float64)[:, None])
    return Llama(replace(llama.spec, tied_embeddings=False), tensors, llama.rotary)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 12, 13, 40, 130])
def test_logits_are_those_of_the_formulas_with_the_quantised_weights(
    library: Library, variant: str, dtype: DType, tied: bool, num_tokens: int
) -> None:
    llama = random_llama(replace(with_dtype(SMALL, dtype), weights="int8", tied_embeddings=tied), biases=True)
    tokens = random_tokens(llama.spec, num_tokens)
    tables, num_blocks = tables_for([num_tokens])
    model = llama.native(library, variant)
    memory = Memory(num_blocks, llama.spec.layout)
    got = torch.from_numpy(model.forward_rows([tokens], [0], tables, range(num_tokens), memory, never))
    expected = reference_logits(dequantised(llama), tokens)
    assert float((got - expected).abs().max() / expected.std()) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 11, 12, 13, 17, 24, 37, 96, 97, 130])
def test_weights_that_8_bits_hold_exactly_give_the_bits_that_they_give_in_the_dtype(
    library: Library, variant: str, dtype: DType, num_rows: int
) -> None:
    """Whole numbers times a power of two: the sums are the same up to that power, whatever the order of the bytes."""
    spec = with_dtype(replace(SPEC, num_layers=1), dtype)
    llama = random_llama(spec)
    generator = torch.Generator().manual_seed(num_rows)
    for name, tensor in llama.tensors.items():
        if tensor.dim() == 2:
            whole = torch.randint(-MOST, MOST + 1, tensor.shape, generator=generator)
            whole[:, 0] = MOST
            llama.tensors[name] = (whole * 2.0**-9).to(tensor.dtype)
    quantised = Llama(replace(spec, weights="int8"), llama.tensors, llama.rotary)
    tokens = random_tokens(spec, num_rows)
    tables, num_blocks = tables_for([num_rows])
    results = []
    for each in (llama, quantised):
        memory = Memory(num_blocks, spec.layout)
        logits = each.native(library, variant).forward_rows([tokens], [0], tables, range(num_rows), memory, never)
        results.append((logits.tobytes(), bytes(memory.buffer)))
    assert results[0] == results[1]


@pytest.fixture
def model(library: Library, variant: str, dtype: DType) -> NativeModel:
    return random_llama(replace(with_dtype(SPEC, dtype), weights="int8")).native(library, variant)


@pytest.mark.parametrize("sizes", [(512,), (37,), (7,), (4, 1, 33), (1000, 1)], ids=lambda s: "+".join(map(str, s)))
def test_chunks_do_not_show(model: NativeModel, sizes: tuple[int, ...]) -> None:
    whole, parts = Trial(model), Trial(model)
    expected = whole.run(0, NUM_TOKENS, [NUM_TOKENS - 1])
    assert parts.run_chunks(forever(*sizes)).tobytes() == expected.tobytes()
    assert parts.kv() == whole.kv()


def test_batch_and_threads_do_not_show(library: Library, variant: str, dtype: DType, model: NativeModel) -> None:
    """Sequences alone on one thread, and in growing batches on two."""
    lengths = [5, 16, 63, 64, 65, 130, 1, 2, 15, 17, 33, 7, 100]
    prompts = [random_tokens(model.spec, length + 1, seed=i) for i, length in enumerate(lengths)]
    tables, num_blocks = tables_for([length + 1 for length in lengths])
    memory = Memory(num_blocks, model.spec.layout)
    prefixes = [SequenceStep(prompt[:-1], 0, table, None) for prompt, table in zip(prompts, tables, strict=True)]
    lasts = [
        SequenceStep(prompt[-1:], length, table, None)
        for prompt, length, table in zip(prompts, lengths, tables, strict=True)
    ]
    model.forward(prefixes, [], memory, never)
    single = random_llama(model.spec).native(library, variant, num_threads=1)
    alone = [single.forward([step], [0], memory, never).tobytes() for step in lasts]
    for batch in (2, 3, 5, 8, 12, 13):
        together = model.forward(lasts[:batch], range(batch), memory, never)
        assert [logits.tobytes() for logits in together] == alone[:batch]


def test_the_numerics_id_tells_how_weights_are_kept(library: Library, variant: str, dtype: DType) -> None:
    plain, quantised = numerics_id(library, variant, dtype), numerics_id(library, variant, dtype, "int8")
    assert "int8" in quantised
    assert plain.split("probe")[1] != quantised.split("probe")[1]


def test_the_library_checks_that_8_bit_weights_have_scales_and_others_have_none(library: Library) -> None:
    variant = library.variants("float32")[0]
    numbers, scales = np.zeros((48, 48), np.float32), np.ones(48, np.float32)
    address = scales.ctypes.data
    for weights, given_scales, words in (("int8", None, "output has no scales"), ("dtype", address, "not of 8 bits")):
        llama = random_llama(replace(SPEC, weights=weights))  # type: ignore[arg-type]
        native = llama.native(library, variant)
        with pytest.raises(EngineError, match=words):
            library.set_matrix(native._handle, 1, 0, 0, numbers.ctypes.data, given_scales, (48, 96))
