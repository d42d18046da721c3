"""No model that we say we run is refused by the native kernels for its sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from native_models import SMALL, Memory, random_llama, random_tokens, reference_logits, tables_for, with_dtype

from pd_core.layout import DType
from pd_engine.native.library import Library
from pd_engine.native.model import _c_spec
from pd_engine.native.spec import NativeSpec
from pd_engine.steps import never


class Sizes(NamedTuple):
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int


MODELS = {
    "Llama-2-7B": Sizes(4096, 11008, 32, 32, 128, 32, 32000),
    "Llama-2-13B": Sizes(5120, 13824, 40, 40, 128, 40, 32000),
    "Llama-2-70B": Sizes(8192, 28672, 64, 8, 128, 80, 32000),
    "Llama-3.1-8B": Sizes(4096, 14336, 32, 8, 128, 32, 128256),
    "Llama-3.1-70B": Sizes(8192, 28672, 64, 8, 128, 80, 128256),
    "Llama-3.2-1B": Sizes(2048, 8192, 32, 8, 64, 16, 128256),
    "Llama-3.2-3B": Sizes(3072, 8192, 24, 8, 128, 28, 128256),
    "TinyLlama-1.1B": Sizes(2048, 5632, 32, 4, 64, 22, 32000),
    "Mistral-7B": Sizes(4096, 14336, 32, 8, 128, 32, 32768),
    "Qwen2-0.5B": Sizes(896, 4864, 14, 2, 64, 24, 151936),
    "Qwen2-1.5B": Sizes(1536, 8960, 12, 2, 128, 28, 151936),
    "Qwen2.5-3B": Sizes(2048, 11008, 16, 2, 128, 36, 151936),
    "Qwen2-7B": Sizes(3584, 18944, 28, 4, 128, 28, 152064),
    "Qwen2.5-14B": Sizes(5120, 13824, 40, 8, 128, 48, 152064),
    "Qwen2.5-32B": Sizes(5120, 27648, 40, 8, 128, 64, 152064),
    "Qwen2-72B": Sizes(8192, 29568, 64, 8, 128, 80, 152064),
    "Qwen3-0.6B": Sizes(1024, 3072, 16, 8, 128, 28, 151936),
    "Qwen3-1.7B": Sizes(2048, 6144, 16, 8, 128, 28, 151936),
    "Qwen3-4B": Sizes(2560, 9728, 32, 8, 128, 36, 151936),
    "Qwen3-8B": Sizes(4096, 12288, 32, 8, 128, 36, 151936),
    "Qwen3-14B": Sizes(5120, 17408, 40, 8, 128, 40, 151936),
    "Qwen3-32B": Sizes(5120, 25600, 64, 8, 128, 64, 151936),
    "SmolLM2-135M": Sizes(576, 1536, 9, 3, 64, 30, 49152),
    "SmolLM2-360M": Sizes(960, 2560, 15, 5, 64, 32, 49152),
    "SmolLM2-1.7B": Sizes(2048, 8192, 32, 32, 64, 24, 49152),
}
HEADS = sorted({(sizes.head_dim, sizes.heads // sizes.kv_heads) for sizes in MODELS.values()})


def spec_of(sizes: Sizes, dtype: DType) -> NativeSpec:
    return NativeSpec(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        context_tokens=131072,
        dtype=dtype,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_real_models_sizes_are_taken(library: Library, name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        spec = spec_of(MODELS[name], dtype)
        assert spec.refusal() is None
        assert replace(spec, weights="int8").refusal() is None
        # a layer's room is set aside, not touched
        handle = library.create(_c_spec(replace(spec, num_layers=1)), library.variants(dtype)[0], 2)
        library.destroy(handle)


@pytest.mark.parametrize(("head_dim", "group"), HEADS)
def test_heads_of_real_models_give_the_logits_of_the_formulas(
    library: Library, variant: str, dtype: DType, head_dim: int, group: int
) -> None:
    """And `hidden_size` is not that of all heads together."""
    spec = replace(
        with_dtype(SMALL, dtype), num_layers=1, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, hidden_size=112
    )
    llama, tokens = random_llama(spec), random_tokens(spec, 81)
    (table,), num_blocks = tables_for([81])
    memory = Memory(num_blocks, spec.layout)
    model = llama.native(library, variant)
    first = torch.from_numpy(model.forward_rows([tokens[:80]], [0], [table], range(80), memory, never))
    last = torch.from_numpy(model.forward_rows([tokens[80:]], [80], [table], [0], memory, never))
    expected = reference_logits(llama, tokens)
    error = float((torch.cat([first, last]) - expected).abs().max() / expected.std())
    assert error < {"float32": 2e-5, "bfloat16": 4e-2}[dtype]
