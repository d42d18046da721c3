"""The native engine behind the engine protocol, and its numerics id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from native_models import SMALL, Memory, random_llama, random_tokens

from pd_core.engine import Engine, SequenceStep
from pd_core.errors import Cancelled, EngineError
from pd_core.layout import DType, Fingerprint
from pd_core.request import GenerateRequest, SamplingParams
from pd_engine.invariance import InvarianceProof
from pd_engine.native.engine import NativeEngine
from pd_engine.native.library import Library
from pd_engine.native.numerics import numerics_id, probe
from pd_engine.reference import generate_alone
from pd_engine.steps import never

GREEDY = SamplingParams()


def engine_of(library: Library, variant: str, dtype: DType, num_blocks: int = 8) -> NativeEngine:
    llama = random_llama(replace(SMALL, dtype=dtype, tied_embeddings=False))
    layout = llama.spec.layout
    fingerprint = Fingerprint("weights", "settings", "tokenizer", numerics_id(library, variant, dtype), layout)
    proof = InvarianceProof(fingerprint.numerics, "weights", [1, 2], None)
    return NativeEngine(llama.native(library, variant), Memory(num_blocks, layout), fingerprint, proof)


def generate(
    engine: Engine, tokens: Sequence[int], max_tokens: int, chunk_tokens: int, blocks: Sequence[int]
) -> list[int]:
    request = GenerateRequest(
        request_id="r", tokens=list(tokens), sampling=SamplingParams(temperature=0.8, seed=5), max_tokens=max_tokens
    )
    return generate_alone(engine, request, chunk_tokens, blocks)


def test_chunks_and_blocks_do_not_show_in_the_tokens(library: Library, variant: str, dtype: DType) -> None:
    engine = engine_of(library, variant, dtype)
    prompt = random_tokens(SMALL, 50)
    expected = generate(engine, prompt, 20, 64, [0, 1, 2, 3, 4])
    assert generate(engine, prompt, 20, 16, [7, 1, 6, 2, 5]) == expected
    assert len(set(expected)) > 3


def test_a_step_that_cannot_run_is_refused_and_cancellation_comes_through(
    library: Library, variant: str, dtype: DType
) -> None:
    engine = engine_of(library, variant, dtype)
    with pytest.raises(EngineError, match="both write into block 0"):
        engine.step([SequenceStep([1], 0, [0], GREEDY), SequenceStep([2], 0, [0], GREEDY)], never)
    with pytest.raises(EngineError, match="without sequences"):
        engine.step([], never)
    with pytest.raises(Cancelled):
        engine.step([SequenceStep([1], 0, [0], GREEDY)], lambda: True)
    assert engine.step([SequenceStep([1], 0, [0], None)], never) == [None]


def test_the_numerics_id_names_variant_and_dtype_and_is_the_same_every_time(
    library: Library, variant: str, dtype: DType
) -> None:
    first, again = (numerics_id(library, variant, dtype) for _ in range(2))
    assert first == again
    assert f" {variant};" in first
    assert dtype in first


def test_the_probe_tells_bfloat16_products_from_widened_ones(library: Library) -> None:
    able = library.variants("bfloat16")
    probes = {variant: probe(library, variant, "bfloat16") for variant in able}
    widened = {probes[variant] for variant in able if variant != "avx512-bf16"}
    assert len(widened) == 1
    assert probes.get("avx512-bf16") not in widened
