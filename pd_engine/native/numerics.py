"""Names what decides the bits of native KV, and measures a part of it.

Processors may disagree on bfloat16 dot products (denormals, the order inside a pair), and a compiler may do what it was
told not to. So the id ends with a digest of what a small model really computes on this machine: two workers with equal
ids have computed equal bits.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from pd_core.layout import DType
from pd_engine.native.library import Library
from pd_engine.native.model import NativeModel
from pd_engine.native.quantise import QUANTISER_VERSION
from pd_engine.native.spec import LAYOUT_NAME, NativeSpec, WeightForm
from pd_engine.native.weights import Array
from pd_engine.scratch import ScratchMemory
from pd_engine.steps import never

KERNELS_VERSION = 1
"""Raise it when the kernels' arithmetic changes a bit."""

TILE_KEYS = 64
SPLIT_KEYS = 512

_PROBE_TOKENS = 600  # two splits
_PROBE_BLOCKS = 38


def numerics_id(library: Library, variant: str, dtype: DType, weights: WeightForm = "dtype") -> str:
    """One line for people and for comparison. Runs the probe: some milliseconds."""
    stored = dtype if weights == "dtype" else f"{dtype} with {weights} weights {QUANTISER_VERSION}"
    return "; ".join(
        (
            f"native kernels {KERNELS_VERSION} {variant}",
            f"{TILE_KEYS} keys a tile, {SPLIT_KEYS} a split",
            f"{stored}, KV {LAYOUT_NAME}",
            f"probe {probe(library, variant, dtype, weights)}",
        )
    )


def probe(library: Library, variant: str, dtype: DType, weights: WeightForm = "dtype") -> str:
    """Digest (hex) of the logits and KV of a small model with fixed weights, some of them tiny."""
    spec = NativeSpec(
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=67,
        context_tokens=_PROBE_TOKENS,
        dtype=dtype,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        weights=weights,
    )
    half = np.arange(_PROBE_TOKENS * spec.head_dim // 2, dtype=np.float32).reshape(_PROBE_TOKENS, -1)
    rotary = (_uneven(half % 97), _uneven(half % 89))
    model = NativeModel(library, spec, _probe_weights(spec), rotary, num_threads=1, variant=variant)
    memory = ScratchMemory(_PROBE_BLOCKS, spec.layout.block_bytes)
    tokens = [(11 * i + i // 7) % spec.vocab_size for i in range(_PROBE_TOKENS)]
    try:
        logits = model.forward_rows([tokens], [0], [range(_PROBE_BLOCKS)], range(0, _PROBE_TOKENS, 7), memory, never)
    finally:
        model.close()
    return hashlib.blake2b(logits.tobytes() + bytes(memory.buffer), digest_size=8).hexdigest()


def _probe_weights(spec: NativeSpec) -> dict[str, Array]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    weights: dict[str, Array] = {
        "model.embed_tokens.weight": _stored(spec, spec.vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
        for name, rows, cols in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{prefix}{name}.weight"] = _stored(spec, rows, cols)
    return weights


def _stored(spec: NativeSpec, rows: int, cols: int) -> Array:
    """A fixed matrix in the model's dtype, by whole-number arithmetic alone."""
    values = _uneven(np.arange(rows * cols, dtype=np.float32).reshape(rows, cols) % 1009)
    if spec.dtype == "float32":
        return values
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _uneven(whole: NDArray[np.float32]) -> NDArray[np.float32]:
    """Numbers from -0.5 to 0.5 for whole ones; every 31st is too small for a normal bfloat16."""
    values = (whole * np.float32(37) % np.float32(64) - np.float32(32)) / np.float32(64) + whole / np.float32(8192)
    values[whole % 31 == 0] = np.float32(2.0**-130)
    return values
