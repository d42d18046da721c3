"""Reads a Llama from a GGUF file: dequantises, and gives the tensors their Hugging Face names and order of rows.

GGUF keeps the rows of q and k of Llama models permuted: the two halves of a head that rotary embedding pairs lie
interleaved there, one after the other here.

    ours   head h: x0 x1 x2 ... y0 y1 y2 ...        pair i = (x_i, y_i), head_dim / 2 apart
    GGUF   head h: x0 y0 x1 y1 x2 y2 ...            pair i = neighbours
"""

from __future__ import annotations

import struct
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from pd_core.errors import ModelError
from pd_model.gguf_tokenizer import tokenizer_json_from_gguf
from pd_model.manifest import ModelManifest, check_manifest, tensor_shapes
from pd_model.source import name_some

T = TypeVar("T")

IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_tensor_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`"""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{IN_LAYER[part]}.weight"


def unpermute_heads(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undoes GGUF's interleaving of the rows of q or k: `[num_heads * head_dim, hidden]` in and out."""
    num_pairs = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, num_pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def as_written(stored: float) -> float:
    """The decimal that the author wrote: GGUF stores 1e-05 as a float32, which reads back as 9.999999747378752e-06."""
    return float(str(np.float32(stored)))


class GgufSource:
    """A GGUF file with a Llama and a byte-level BPE tokenizer. Raises ModelError if it is broken or something else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            reader = gguf.GGUFReader(path)
            self._values: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OSError, struct.error) as error:
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._manifest = self._read_manifest()

    @property
    def manifest(self) -> ModelManifest:
        return self._manifest

    @cached_property
    def tokenizer_json(self) -> str:
        return tokenizer_json_from_gguf(self._values)

    @property
    def chat_template(self) -> str | None:
        value = self._values.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    @property
    def template_tokens(self) -> dict[str, str]:
        tokens: list[str] = self._values.get("tokenizer.ggml.tokens", [])
        ids = {kind: self._values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
        return {f"{kind}_token": tokens[token] for kind, token in ids.items() if token is not None}

    def check_tensors(self) -> None:
        needed = {gguf_tensor_name(name) for name in tensor_shapes(self._manifest)}
        if missing := needed - self._tensors.keys():
            raise ModelError(f"{self._path} lacks tensors: {name_some(missing)}")
        if unknown := self._tensors.keys() - needed:
            raise ModelError(f"{self._path} has tensors that are not supported yet: {name_some(unknown)}")

    def read(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[gguf_tensor_name(name)]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {tensor.name} in {self._path} is quantised as {tensor.tensor_type.name}, which cannot be read"
            ) from error
        values = np.asarray(values, np.float32)
        if name.endswith("q_proj.weight"):
            return unpermute_heads(values, self._manifest.num_heads)
        if name.endswith("k_proj.weight"):
            return unpermute_heads(values, self._manifest.num_kv_heads)
        return values

    def _value(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self._values.get(key, default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ModelError(f"{self._path} has {value!r} for {key}; {kind.__name__} is needed")
        return value

    def _read_manifest(self) -> ModelManifest:
        architecture = self._value("general.architecture", str)
        if architecture != "llama":
            raise ModelError(f"{self._path} holds architecture {architecture!r}; only 'llama' is supported yet")
        self._refuse_variants()
        hidden_size = self._value("llama.embedding_length", int)
        num_heads = self._value("llama.attention.head_count", int)
        head_dim = self._value("llama.attention.key_length", int, hidden_size // max(num_heads, 1))
        rope_dim = self._value("llama.rope.dimension_count", int, head_dim)
        value_dim = self._value("llama.attention.value_length", int, head_dim)
        if not rope_dim == value_dim == head_dim:
            raise ModelError(
                f"{self._path} has heads of {head_dim} with a rotary part of {rope_dim} and values of {value_dim}; "
                "that is not supported yet"
            )
        manifest = ModelManifest(
            architecture="llama",
            num_layers=self._value("llama.block_count", int),
            hidden_size=hidden_size,
            intermediate_size=self._value("llama.feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=self._value("llama.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            context_tokens=self._value("llama.context_length", int),
            rms_norm_eps=as_written(self._value("llama.attention.layer_norm_rms_epsilon", float)),
            rope_theta=as_written(self._value("llama.rope.freq_base", float, 10000.0)),
            tied_embeddings="output.weight" not in self._tensors,
            eos_token_ids=self._eos_token_ids(),
            bos_token_id=self._values.get("tokenizer.ggml.bos_token_id"),
        )
        check_manifest(manifest)
        return manifest

    def _refuse_variants(self) -> None:
        scaling = self._values.get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors:
            raise ModelError(f"{self._path} scales its rotary embedding ({scaling}); that is not supported yet")
        if self._values.get("llama.expert_count", 0):
            raise ModelError(f"{self._path} is a mixture of experts; that is not supported yet")
        if self._values.get("llama.attention.sliding_window", 0):
            raise ModelError(f"{self._path} has a sliding window; that is not supported yet")
        if biases := {name for name in self._tensors if name.endswith(".bias")}:
            raise ModelError(f"{self._path} has biases ({name_some(biases)}); they are not supported yet")

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{self._path} lacks tensors: token_embd.weight")
        return int(embedding.shape[1])  # GGUF lists dimensions innermost first

    def _eos_token_ids(self) -> list[int]:
        ends = (self._values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return sorted({end for end in ends if end is not None})
