"""Reads a model from a GGUF file: dequantises, and gives the tensors their Hugging Face names and order of rows.

GGUF keeps the rows of q and k of Llama models permuted: the two halves of a head that rotary embedding pairs lie
interleaved there, one after the other here. (Qwen's lie as they do here.)

    ours   head h: x0 x1 x2 ... y0 y1 y2 ...        pair i = (x_i, y_i), head_dim / 2 apart
    GGUF   head h: x0 y0 x1 y1 x2 y2 ...            pair i = neighbours
"""

from __future__ import annotations

import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf

from pd_core.errors import ModelError
from pd_model.gguf_settings import ROPE_DIVISORS, GgufSettings, gguf_tensor_name
from pd_model.gguf_tensor import STORED_AS, read_stored
from pd_model.gguf_tokenizer import tokenizer_json_from_gguf
from pd_model.manifest import KEY, QUERY, ModelManifest, check_manifest, tensor_shapes
from pd_model.rope import served_context
from pd_model.source import name_some
from pd_model.stored_type import Stored, StoredType, to_float32


def unpermute_heads(rows: Stored, num_heads: int) -> Stored:
    """Undoes GGUF's interleaving of the rows of q or k: `[num_heads * head_dim, ...]` in and out."""
    num_pairs = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, num_pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


class GgufSource:
    """A GGUF file with one of the ARCHITECTURES. Raises ModelError if it is broken or something else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            reader = gguf.GGUFReader(path)
            self._values: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OSError, struct.error) as error:
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._settings = GgufSettings(path, self._values)
        self._manifest = self._read_manifest()
        self._shapes = tensor_shapes(self._manifest)

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
        if strange := {kind: token for kind, token in ids.items() if token is not None and token >= len(tokens)}:
            raise ModelError(f"{self._path} has {len(tokens)} tokens; ids outside of them: {strange}")
        return {f"{kind}_token": tokens[token] for kind, token in ids.items() if token is not None}

    def check_tensors(self) -> None:
        needed = {gguf_tensor_name(name) for name in self._shapes}
        if missing := needed - self._tensors.keys():
            raise ModelError(f"{self._path} lacks tensors: {name_some(missing)}")
        if unknown := self._tensors.keys() - needed - {ROPE_DIVISORS}:
            raise ModelError(f"{self._path} has tensors that this model does not use: {name_some(unknown)}")
        for name in sorted(needed):
            if (kind := self._tensors[name].tensor_type) not in STORED_AS:
                raise ModelError(
                    f"tensor {name} in {self._path} is {kind.name}; types that are read: "
                    f"{', '.join(served.name for served in STORED_AS)}"
                )

    def stored_type(self, name: str) -> StoredType:
        return STORED_AS[self._tensors[gguf_tensor_name(name)].tensor_type]

    def read(self, name: str) -> Stored:
        tensor = self._tensors[gguf_tensor_name(name)]
        stored = read_stored(tensor)
        if stored.shape != self._shapes[name]:
            raise ModelError(f"tensor {name} has shape {stored.shape}; this model needs {self._shapes[name]}")
        if self._settings.architecture.permuted:
            linear = name.rpartition(".")[0]
            if linear.endswith(QUERY):
                return unpermute_heads(stored, self._manifest.num_heads)
            if linear.endswith(KEY):
                return unpermute_heads(stored, self._manifest.num_kv_heads)
        return stored

    def _read_manifest(self) -> ModelManifest:
        settings = self._settings
        trained_tokens = settings.own("context_length", int)
        rope = settings.rope(trained_tokens, self._rope_divisors())
        context_tokens = served_context(trained_tokens, rope.scaling)
        settings.check_keys(context_tokens)
        hidden_size = settings.own("embedding_length", int)
        num_heads = settings.own("attention.head_count", int)
        manifest = ModelManifest(
            architecture=settings.name,
            num_layers=settings.own("block_count", int),
            hidden_size=hidden_size,
            intermediate_size=settings.own("feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=settings.own("attention.head_count_kv", int, num_heads),
            head_dim=self._head_dim(hidden_size // max(num_heads, 1)),
            vocab_size=self._vocab_size(),
            context_tokens=context_tokens,
            rms_norm_eps=settings.own("attention.layer_norm_rms_epsilon", float),
            rope_theta=rope.theta,
            tied_embeddings="output.weight" not in self._tensors,
            eos_token_ids=self._eos_token_ids(),
            bos_token_id=self._values.get("tokenizer.ggml.bos_token_id"),
            qk_norm=settings.architecture.qk_norm,
            biases=settings.biases(self._tensors.keys()),
            rope_scaling=rope.scaling,
        )
        check_manifest(manifest)
        return manifest

    def _head_dim(self, even_share: int) -> int:
        settings = self._settings
        head_dim = settings.own("attention.key_length", int, even_share)
        rope_dim = settings.own("rope.dimension_count", int, head_dim)
        value_dim = settings.own("attention.value_length", int, head_dim)
        if not rope_dim == value_dim == head_dim:
            raise ModelError(
                f"{self._path} has heads of {head_dim} with a rotary part of {rope_dim} and values of {value_dim}; "
                "only heads that are all of one size are served"
            )
        return head_dim

    def _rope_divisors(self) -> list[float] | None:
        tensor = self._tensors.get(ROPE_DIVISORS)
        if tensor is None:
            return None
        if STORED_AS.get(tensor.tensor_type) != "F32":
            raise ModelError(f"tensor {ROPE_DIVISORS} in {self._path} is {tensor.tensor_type.name}; F32 is needed")
        return [float(value) for value in to_float32(read_stored(tensor)).reshape(-1)]

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{self._path} lacks tensors: token_embd.weight, a matrix")
        return int(embedding.shape[1])  # GGUF lists dimensions innermost first

    def _eos_token_ids(self) -> list[int]:
        ends = (self._values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return sorted({end for end in ends if end is not None})
