"""Gives a model its weights, tensor by tensor, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pd_core.errors import ModelError
from pd_core.layout import DType
from pd_engine.native.library import Library
from pd_engine.native.quantise import quantise_rows
from pd_engine.native.spec import NativeSpec

QKV, OUTPUT, GATE_UP, DOWN, HEAD = range(5)
ATTENTION_NORM, MLP_NORM, FINAL_NORM, QUERY_NORM, KEY_NORM = range(5)

Array = NDArray[Any]

_STORED: dict[DType, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16}


def stored_array(tensor: Any, dtype: DType) -> Array:
    """A contiguous array of the dtype's numbers; bfloat16 stands in it as uint16, bit for bit.

    tensor: a torch tensor (any float type, on the CPU), or an array of float32, or of uint16 when dtype is bfloat16
    Shares the tensor's memory where nothing has to be converted.
    """
    if isinstance(tensor, np.ndarray):
        if tensor.dtype != _STORED[dtype]:
            raise ModelError(f"an array of {tensor.dtype} holds no {dtype}")
        return np.ascontiguousarray(tensor)
    if dtype == "float32":
        return np.ascontiguousarray(tensor.detach().float().numpy())
    return tensor.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()  # type: ignore[no-any-return]


class WeightLoader:
    """Packs the tensors of one model. `tensors` gives each by its name; each is asked for once, in layer order."""

    def __init__(self, library: Library, handle: int, spec: NativeSpec, tensors: Mapping[str, Any]) -> None:
        self._library = library
        self._handle = handle
        self._spec = spec
        self._tensors = tensors

    def load(self) -> Array:
        """Packs everything; returns the embedding, which the model reads in place. Raises ModelError."""
        for layer in range(self._spec.num_layers):
            self._load_layer(layer, f"model.layers.{layer}.")
        self._vector(FINAL_NORM, 0, "model.norm.weight", self._spec.hidden_size)
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        embedding = self._array("model.embed_tokens.weight", self._spec.dtype, shape)
        if self._spec.tied_embeddings:
            self._packed(HEAD, 0, 0, embedding, "model.embed_tokens.weight")
        else:
            self._matrix(HEAD, 0, 0, "lm_head", *shape)
        return embedding

    def _load_layer(self, layer: int, prefix: str) -> None:
        spec = self._spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        self._vector(ATTENTION_NORM, layer, prefix + "input_layernorm.weight", hidden)
        self._matrix(QKV, layer, 0, attention + "q_proj", queries, hidden)
        self._matrix(QKV, layer, queries, attention + "k_proj", keys, hidden)
        self._matrix(QKV, layer, queries + keys, attention + "v_proj", keys, hidden)
        for vector, name in ((QUERY_NORM, "q_norm.weight"), (KEY_NORM, "k_norm.weight")):
            if attention + name in self._tensors:
                self._vector(vector, layer, attention + name, spec.head_dim)
        self._matrix(OUTPUT, layer, 0, attention + "o_proj", hidden, queries)
        self._vector(MLP_NORM, layer, prefix + "post_attention_layernorm.weight", hidden)
        self._matrix(GATE_UP, layer, 0, mlp + "gate_proj", inner, hidden)
        self._matrix(GATE_UP, layer, inner, mlp + "up_proj", inner, hidden)
        self._matrix(DOWN, layer, 0, mlp + "down_proj", hidden, inner)

    def _matrix(self, matrix: int, layer: int, first_row: int, name: str, rows: int, cols: int) -> None:
        array = self._array(f"{name}.weight", self._spec.dtype, (rows, cols))
        self._packed(matrix, layer, first_row, array, f"{name}.weight")
        if f"{name}.bias" in self._tensors:
            bias = self._array(f"{name}.bias", "float32", (rows,))
            self._library.set_bias(self._handle, matrix, layer, first_row, bias.ctypes.data, rows)

    def _packed(self, matrix: int, layer: int, first_row: int, array: Array, name: str) -> None:
        """Hands over a matrix of the dtype, in 8 bits where the model keeps its weights so."""
        if self._spec.weights == "int8":
            quantised = quantise_rows(array, name)
            numbers, scales = quantised.numbers, quantised.scales.ctypes.data
        else:
            numbers, scales = array, None
        address = numbers.ctypes.data
        self._library.set_matrix(self._handle, matrix, layer, first_row, address, scales, numbers.shape)

    def _vector(self, vector: int, layer: int, name: str, size: int) -> None:
        array = self._array(name, "float32", (size,))
        self._library.set_vector(self._handle, vector, layer, array.ctypes.data, size)

    def _array(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Array:
        if name not in self._tensors:
            raise ModelError(f"the weights lack {name}")
        tensor = self._tensors[name]
        if isinstance(tensor, np.ndarray) and tensor.dtype == np.uint16 and dtype == "float32":
            tensor = (tensor.astype(np.uint32) << 16).view(np.float32)  # norms of a bfloat16 model
        array = stored_array(tensor, dtype)
        if array.shape != shape:
            raise ModelError(f"{name} is {list(array.shape)}; the manifest says {list(shape)}")
        return array
