"""The weights of a model, as the decoder multiplies with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pd_core.errors import EngineError, ModelError
from pd_engine.device import CPU
from pd_engine.tensor_file import TensorFile
from pd_model.manifest import (
    DOWN,
    GATE,
    KEY,
    KEY_NORM,
    OUTPUT,
    QUERY,
    QUERY_NORM,
    UP,
    VALUE,
    ModelManifest,
    tensor_shapes,
)

_ALIGNMENT_BYTES = 64
"""Matrix products may differ in their last bit with the alignment of their operands: all weights get the same."""


@dataclass(frozen=True, slots=True)
class Linear:
    """matrix: [out, in]; bias: [out], or None"""

    matrix: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer.

    qkv:     q, k and v one below the other: [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    gate_up: gate above up: [2 * intermediate, hidden]
    query_norm, key_norm: [head_dim]; None where heads are not normed
    """

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding and head: [vocab, hidden]; one tensor when they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def read_weights(path: Path, manifest: ModelManifest, dtype: torch.dtype, device: torch.device = CPU) -> Weights:
    """Weights of a safetensors file (memory-mapped, Hugging Face's names) in `dtype`, on `device`.

    Raises ModelError when the file cannot be read, or a tensor is missing or has another shape than the manifest says;
    EngineError when the device has no room.
    """
    return _Reader(TensorFile(path), manifest, dtype, device).read()


class _Reader:
    def __init__(self, tensors: TensorFile, manifest: ModelManifest, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = tensors
        self._manifest = manifest
        self._dtype = dtype
        self._device = device
        self._shapes = tensor_shapes(manifest)

    def read(self) -> Weights:
        embedding = self._tensor("model.embed_tokens.weight")
        return Weights(
            embedding=embedding,
            layers=[self._layer(f"model.layers.{layer}.") for layer in range(self._manifest.num_layers)],
            norm=self._tensor("model.norm.weight"),
            head=embedding if self._manifest.tied_embeddings else self._tensor("lm_head.weight"),
        )

    def _layer(self, prefix: str) -> LayerWeights:
        return LayerWeights(
            attention_norm=self._tensor(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(prefix, QUERY, KEY, VALUE),
            query_norm=self._tensor(f"{prefix}{QUERY_NORM}.weight") if self._manifest.qk_norm else None,
            key_norm=self._tensor(f"{prefix}{KEY_NORM}.weight") if self._manifest.qk_norm else None,
            output=self._linear(prefix, OUTPUT),
            mlp_norm=self._tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(prefix, GATE, UP),
            down=self._linear(prefix, DOWN),
        )

    def _linear(self, prefix: str, *names: str) -> Linear:
        """The linears one below the other. Where only some of them have a bias, the others' is 0."""
        matrices = [self._tensor(f"{prefix}{name}.weight") for name in names]
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        if not any(name in self._manifest.biases for name in names):
            return Linear(matrix, None)
        biases = [
            self._tensor(f"{prefix}{name}.bias")
            if name in self._manifest.biases
            else matrix.new_zeros(self._shapes[f"{prefix}{name}.weight"][0])
            for name in names
        ]
        return Linear(matrix, torch.cat(biases))

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"the weights lack {name}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelError(f"{name} is {list(tensor.shape)}; the manifest says {list(self._shapes[name])}")
        try:
            tensor = tensor.to(self._device, self._dtype)
        except RuntimeError as error:
            raise EngineError(f"the weights have no room on {self._device}: {error}") from error
        return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()
