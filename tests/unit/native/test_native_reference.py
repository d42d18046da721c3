"""The native forward pass against float64 formulas."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
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
from torch import Tensor

from pd_core.layout import DType
from pd_engine.native.library import Library
from pd_engine.native.spec import NativeSpec
from pd_engine.steps import never

# Largest error relative to the logits' spread: float32 rounds in the 7th digit, bfloat16 in the 3rd.
TOLERANCE: dict[DType, float] = {"float32": 2e-5, "bfloat16": 4e-2}


@functools.lru_cache(maxsize=16)
def reference(spec: NativeSpec, num_tokens: int, biases: bool, head_norms: bool) -> tuple[Llama, list[int], Tensor]:
    """Model, tokens and their logits: the same for every variant of the kernels."""
    llama = random_llama(spec, biases=biases, head_norms=head_norms)
    tokens = random_tokens(spec, num_tokens)
    return llama, tokens, reference_logits(llama, tokens)


def error_of(
    library: Library,
    spec: NativeSpec,
    variant: str,
    num_tokens: int,
    *,
    biases: bool = False,
    head_norms: bool = False,
    num_reference: int | None = None,
) -> float:
    """Largest error over all rows, relative to the logits' standard deviation.

    num_reference: the formulas are worked out for so many tokens; those of fewer are their first rows, as no row sees
                   a later one
    """
    llama, tokens, expected = reference(spec, num_reference or num_tokens, biases, head_norms)
    tables, num_blocks = tables_for([num_tokens])
    model = llama.native(library, variant)
    memory = Memory(num_blocks, spec.layout)
    got = torch.from_numpy(model.forward_rows([tokens[:num_tokens]], [0], tables, range(num_tokens), memory, never))
    expected = expected[:num_tokens]
    return float((got - expected).abs().max() / expected.std())


EDGES = [1, 2, 15, 16, 17, 40, 63, 64, 65, 130, 511, 512, 513, 1100]
ROWS = range(1, 41)


@pytest.mark.parametrize("num_tokens", EDGES)
def test_logits_are_those_of_the_formulas_at_every_edge_of_blocks_tiles_and_splits(
    library: Library, variant: str, dtype: DType, num_tokens: int
) -> None:
    spec = with_dtype(SMALL, dtype)
    assert error_of(library, spec, variant, num_tokens, num_reference=max(EDGES)) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 144, 256])
def test_every_head_dim_that_is_a_multiple_of_16_works(
    library: Library, variant: str, dtype: DType, head_dim: int
) -> None:
    spec = replace(with_dtype(SMALL, dtype), head_dim=head_dim, num_layers=1)
    assert error_of(library, spec, variant, 90) < TOLERANCE[dtype]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 100])
def test_every_group_size_works(library: Library, variant: str, dtype: DType, group: int) -> None:
    spec = replace(with_dtype(SMALL, dtype), num_heads=2 * group, num_kv_heads=2, head_dim=16, num_layers=1)
    assert error_of(library, spec, variant, 75) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_tokens", ROWS)
def test_every_number_of_rows_works(library: Library, variant: str, dtype: DType, num_tokens: int) -> None:
    spec = replace(with_dtype(SMALL, dtype), num_layers=1)
    assert error_of(library, spec, variant, num_tokens, num_reference=max(ROWS)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("hidden", "inner", "vocab"), [(16, 16, 1), (48, 16, 31), (32, 208, 32), (208, 48, 33)])
def test_outputs_that_do_not_fill_a_panel_are_not_lost(
    library: Library, variant: str, dtype: DType, hidden: int, inner: int, vocab: int
) -> None:
    sizes = replace(with_dtype(SMALL, dtype), hidden_size=hidden, intermediate_size=inner, vocab_size=max(vocab, 2))
    assert error_of(library, sizes, variant, 33) < TOLERANCE[dtype]


def test_biases_head_norms_and_a_head_of_its_own_are_used(library: Library, variant: str, dtype: DType) -> None:
    spec = replace(with_dtype(SMALL, dtype), tied_embeddings=False, attention_scale=0.11)
    llama = random_llama(spec, biases=True, head_norms=True)
    assert error_of(library, spec, variant, 70, biases=True, head_norms=True) < TOLERANCE[dtype]
    plain = Llama(
        spec, {k: v for k, v in llama.tensors.items() if "q_norm" not in k and "k_norm" not in k}, llama.rotary
    )
    tokens = random_tokens(spec, 70)
    assert not torch.allclose(reference_logits(plain, tokens), reference_logits(llama, tokens), rtol=0.1)


def test_variants_without_bfloat16_products_give_the_same_bits(library: Library) -> None:
    for dtype in ("float32", "bfloat16"):
        llama = random_llama(with_dtype(SMALL, dtype))
        tokens = random_tokens(SMALL, 600)
        tables, num_blocks = tables_for([600])
        results = []
        for variant in set(library.variants(dtype)) & {"avx512", "avx2"}:
            memory = Memory(num_blocks, llama.spec.layout)
            model = llama.native(library, variant)
            results.append(model.forward_rows([tokens], [0], tables, range(600), memory, never).tobytes())
        assert len(set(results)) == 1
