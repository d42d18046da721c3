"""The weights of a Llama, as the decoder multiplies with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pd_core.errors import ModelError
from pd_engine.tensor_file import TensorFile
from pd_model.manifest import ModelManifest

_ALIGNMENT_BYTES = 64
"""Matrix products may differ in their last bit with the alignment of their operands: all weights get the same."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in].

    qkv:     q, k and v one below the other: [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    gate_up: gate above up: [2 * intermediate, hidden]
    """

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding and head: [vocab, hidden]; one tensor when they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def read_weights(path: Path, manifest: ModelManifest, dtype: torch.dtype) -> Weights:
    """Weights of a safetensors file (memory-mapped, Hugging Face's names) in `dtype`.

    Raises ModelError when the file cannot be read, or a tensor is missing or has another shape than the manifest says.
    """
    return _Reader(TensorFile(path), manifest, dtype).read()


class _Reader:
    def __init__(self, tensors: TensorFile, manifest: ModelManifest, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._manifest = manifest
        self._dtype = dtype

    def read(self) -> Weights:
        m = self._manifest
        embedding = self._tensor("model.embed_tokens.weight", m.vocab_size, m.hidden_size)
        tied = m.tied_embeddings
        return Weights(
            embedding=embedding,
            layers=[self._layer(f"model.layers.{layer}.") for layer in range(m.num_layers)],
            norm=self._tensor("model.norm.weight", m.hidden_size),
            head=embedding if tied else self._tensor("lm_head.weight", m.vocab_size, m.hidden_size),
        )

    def _layer(self, prefix: str) -> LayerWeights:
        m = self._manifest
        hidden, inner = m.hidden_size, m.intermediate_size
        q_rows, kv_rows = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        qkv = [
            self._tensor(f"{prefix}self_attn.{name}_proj.weight", rows, hidden)
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        ]
        gate_up = [self._tensor(f"{prefix}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
        return LayerWeights(
            attention_norm=self._tensor(f"{prefix}input_layernorm.weight", hidden),
            qkv=torch.cat(qkv),
            output=self._tensor(f"{prefix}self_attn.o_proj.weight", hidden, q_rows),
            mlp_norm=self._tensor(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=torch.cat(gate_up),
            down=self._tensor(f"{prefix}mlp.down_proj.weight", hidden, inner),
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"the weights lack {name}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} is {list(tensor.shape)}; the manifest says {list(shape)}")
        tensor = tensor.to(self._dtype)
        return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()
