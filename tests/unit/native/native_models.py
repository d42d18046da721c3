"""Small random Llamas for the native kernels, and a float64 reference written straight from the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pd_core.layout import BLOCK_TOKENS, BlockLayout, DType
from pd_engine.native.library import Library
from pd_engine.native.model import NativeModel
from pd_engine.native.spec import NativeSpec
from pd_engine.scratch import ScratchMemory

TORCH_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SMALL = NativeSpec(
    num_layers=3,
    hidden_size=80,
    intermediate_size=112,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=103,
    context_tokens=2048,
    dtype="float32",
    rms_norm_eps=1e-5,
    tied_embeddings=True,
)


class Memory(ScratchMemory):
    """A pool's memory, full of NaN: nothing may be read that was not written or zeroed first."""

    def __init__(self, num_blocks: int, layout: BlockLayout) -> None:
        super().__init__(num_blocks, layout.block_bytes)
        for block_id in range(num_blocks):
            self.block(block_id)[:] = b"\xff" * layout.block_bytes


@dataclass(frozen=True)
class Llama:
    """Weights under Hugging Face's names, and rotary tables."""

    spec: NativeSpec
    tensors: dict[str, Tensor]
    rotary: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

    def native(self, library: Library, variant: str, num_threads: int = 2) -> NativeModel:
        return NativeModel(library, self.spec, self.tensors, self.rotary, num_threads=num_threads, variant=variant)


def random_llama(spec: NativeSpec, *, seed: int = 1, biases: bool = False, head_norms: bool = False) -> Llama:
    """Weights scaled so that activations keep about unit size and attention is neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(TORCH_DTYPES[spec.dtype])

    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = {
        "model.embed_tokens.weight": random(spec.vocab_size, hidden, scale=1.0),
        "model.norm.weight": 1 + random(hidden, scale=0.1),
    }
    if not spec.tied_embeddings:
        tensors["lm_head.weight"] = random(spec.vocab_size, hidden, scale=hidden**-0.5)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = 1 + random(hidden, scale=0.1)
        tensors[prefix + "post_attention_layernorm.weight"] = 1 + random(hidden, scale=0.1)
        for name, rows, cols, scale in (
            ("self_attn.q_proj", queries, hidden, 1.5),
            ("self_attn.k_proj", keys, hidden, 1.5),
            ("self_attn.v_proj", keys, hidden, 1.0),
            ("self_attn.o_proj", hidden, queries, 1.0),
            ("mlp.gate_proj", inner, hidden, 1.0),
            ("mlp.up_proj", inner, hidden, 1.0),
            ("mlp.down_proj", hidden, inner, 1.0),
        ):
            tensors[f"{prefix}{name}.weight"] = random(rows, cols, scale=scale * cols**-0.5)
            if biases:
                tensors[f"{prefix}{name}.bias"] = random(rows, scale=0.3)
        if head_norms:
            tensors[prefix + "self_attn.q_norm.weight"] = 1 + random(spec.head_dim, scale=0.1)
            tensors[prefix + "self_attn.k_norm.weight"] = 1 + random(spec.head_dim, scale=0.1)
    return Llama(spec, tensors, rotary_tables(spec))


def rotary_tables(spec: NativeSpec) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    frequencies = 10000.0 ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
    angles = np.arange(spec.context_tokens)[:, None] * frequencies[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def reference_logits(llama: Llama, tokens: Sequence[int]) -> Tensor:
    """float64 logits [len(tokens), vocab] of one sequence from position 0."""
    spec = llama.spec
    weights = {name: tensor.double() for name, tensor in llama.tensors.items()}
    cos, sin = (torch.from_numpy(table[: len(tokens)].astype(np.float64))[:, None] for table in llama.rotary)
    hidden = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(spec.num_layers):
        hidden = _reference_layer(spec, weights, f"model.layers.{layer}.", hidden, cos, sin)
    head = weights["model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"]
    return _norm(hidden, weights["model.norm.weight"], spec.rms_norm_eps) @ head.T


def _reference_layer(
    spec: NativeSpec, weights: dict[str, Tensor], prefix: str, hidden: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{prefix}{name}.weight"].T + weights.get(f"{prefix}{name}.bias", 0.0)

    def heads(x: Tensor, name: str, norm: str | None) -> Tensor:
        made = linear(x, f"self_attn.{name}_proj").view(len(hidden), -1, spec.head_dim)
        weight = weights.get(f"{prefix}self_attn.{norm}.weight")
        return made if weight is None else _norm(made, weight, spec.rms_norm_eps)

    x = _norm(hidden, weights[prefix + "input_layernorm.weight"], spec.rms_norm_eps)
    q, k = (_rotate(heads(x, name, f"{name}_norm"), cos, sin) for name in ("q", "k"))
    v = heads(x, "v", None)
    group = spec.num_heads // spec.num_kv_heads
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (spec.attention_scale or spec.head_dim**-0.5)
    scores = scores.masked_fill(torch.ones(len(hidden), len(hidden)).triu(1).bool(), float("-inf"))
    seen = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(hidden), -1)
    hidden = hidden + linear(seen, "self_attn.o_proj")
    x = _norm(hidden, weights[prefix + "post_attention_layernorm.weight"], spec.rms_norm_eps)
    return hidden + linear(
        torch.nn.functional.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj"
    )


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def tables_for(lengths: Sequence[int], *, seed: int = 0) -> tuple[list[list[int]], int]:
    """Disjoint block tables in scattered order for sequences of so many tokens, and how many blocks they need."""
    needed = [-(-length // BLOCK_TOKENS) for length in lengths]
    ids = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [ids[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(needed))]
    return tables, len(ids)


def random_tokens(spec: NativeSpec, num_tokens: int, *, seed: int = 7) -> list[int]:
    found = torch.randint(0, spec.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in found]


def with_dtype(spec: NativeSpec, dtype: DType) -> NativeSpec:
    return replace(spec, dtype=dtype)
