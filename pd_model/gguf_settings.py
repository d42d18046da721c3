"""What a GGUF file may say of its model: architectures, keys that are known, rotary embedding. Tables; no files.

An architecture's own keys (`llama.…`) say what it computes, so one that is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from pd_core.errors import ModelError
from pd_model.hf_settings import QKV, QKVO
from pd_model.manifest import DOWN, GATE, KEY, KEY_NORM, LINEARS, OUTPUT, QUERY, QUERY_NORM, UP, VALUE
from pd_model.rope import (
    DEFAULT_BETA_FAST,
    DEFAULT_BETA_SLOW,
    DEFAULT_THETA,
    DividedRope,
    LinearRope,
    RopeScaling,
    RopeSettings,
    YarnRope,
    yarn_attention_factor,
)

T = TypeVar("T")


class Architecture(msgspec.Struct, frozen=True):
    """One value of general.architecture.

    permuted:      rows of q and k lie interleaved (see `gguf_source`)
    biased:        linears that always have a bias
    may_bias:      linears that may have one: those whose tensors are in the file
    divided_rope:  rope_freqs.weight may divide the rotary frequencies
    """

    permuted: bool
    qk_norm: bool
    biased: tuple[str, ...]
    may_bias: tuple[str, ...]
    divided_rope: bool


ARCHITECTURES: dict[str, Architecture] = {
    #         permuted qk_norm biased may_bias divided_rope
    "llama": Architecture(True, False, (), LINEARS, True),  # Mistral and SmolLM too
    "qwen2": Architecture(False, False, QKV, QKV, False),
    "qwen3": Architecture(False, True, (), QKVO, False),
}

IN_LAYER = {
    "input_layernorm": "attn_norm",
    QUERY: "attn_q",
    KEY: "attn_k",
    VALUE: "attn_v",
    OUTPUT: "attn_output",
    QUERY_NORM: "attn_q_norm",
    KEY_NORM: "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    GATE: "ffn_gate",
    UP: "ffn_up",
    DOWN: "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ROPE_DIVISORS = "rope_freqs.weight"

KNOWN_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
"""Keys below the architecture's name that are read here or in `gguf_source`."""

IDLE_KEYS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})
"""Keys that change nothing of what is computed."""

ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scale_linear": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Keys that are served with one value alone: the one that changes nothing."""


def gguf_tensor_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`"""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, part = name.split(".", 3)
    inner, _, kind = part.rpartition(".")
    return f"blk.{layer}.{IN_LAYER[inner]}.{kind}"


def as_written(stored: float) -> float:
    """The decimal that the author wrote: GGUF stores 1e-05 as a float32, which reads back as 9.999999747378752e-06."""
    return float(str(np.float32(stored)))


class GgufSettings:
    """A file's keys. Raises ModelError, naming key, value and file, for what is missing, wrong or not served."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self.name = self.value("general.architecture", str)
        if self.name not in ARCHITECTURES:
            raise ModelError(
                f"{path} has general.architecture {self.name!r}; those that are served: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[self.name]

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key by its whole name."""
        value = self._values.get(key, default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ModelError(f"{self.path} has {value!r} for {key}; {kind.__name__} is needed")
        return value

    def own(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key below the architecture's name; floats as their author wrote them."""
        value = self.value(f"{self.name}.{key}", kind, default)
        return as_written(value) if isinstance(value, float) else value  # type: ignore[return-value]

    def check_keys(self, context_tokens: int) -> None:
        """Raises ModelError for a part of a model, a mixture of experts, a sliding window and keys that are unknown."""
        if (whole := self._values.get("general.type", "model")) != "model":
            raise ModelError(f"{self.path} has general.type {whole!r}; only 'model' is served")
        if (pieces := self._values.get("split.count", 1)) > 1:
            raise ModelError(f"{self.path} has split.count {pieces}: join the pieces into one file first")
        prefix = f"{self.name}."
        for key in sorted(self._values):
            if key.startswith(prefix):
                self._check_key(key, key.removeprefix(prefix))
        if experts := self.own("expert_count", int, 0):
            raise ModelError(f"{self.path} has {prefix}expert_count {experts}: mixtures of experts are not served")
        window = self.own("attention.sliding_window", int, 0)
        if 0 < window < context_tokens:
            raise ModelError(
                f"{self.path} has {prefix}attention.sliding_window {window} in a context of {context_tokens}; "
                "only full attention is served"
            )

    def biases(self, tensors: Collection[str]) -> list[str]:
        """The linears that have a bias, in LINEARS' order. tensors: names of those in the file."""
        found = [name for name in self.architecture.may_bias if f"blk.0.{IN_LAYER[name]}.bias" in tensors]
        return [name for name in LINEARS if name in (*self.architecture.biased, *found)]

    def rope(self, trained_tokens: int, divisors: list[float] | None) -> RopeSettings:
        """divisors: the numbers of ROPE_DIVISORS, when the file has that tensor"""
        theta = self.own("rope.freq_base", float, DEFAULT_THETA)
        factor = self.own("rope.scaling.factor", float, 1.0)
        kind = self.own("rope.scaling.type", str, "none" if factor == 1.0 else "linear")
        if kind not in ("none", "linear", "yarn"):
            raise ModelError(f"{self.path} has {self.name}.rope.scaling.type {kind!r}; served are none, linear, yarn")
        if divisors is not None and (kind != "none" or not self.architecture.divided_rope):
            raise ModelError(
                f"{self.path} has {ROPE_DIVISORS} with {self.name}.rope.scaling.type {kind!r}, which is not served"
            )
        return RopeSettings(theta, self._scaling(kind, factor, trained_tokens, divisors))

    def _scaling(
        self, kind: str, factor: float, trained_tokens: int, divisors: list[float] | None
    ) -> RopeScaling | None:
        match kind:
            case "linear":
                return LinearRope(factor)
            case "yarn":
                given = self.own("rope.scaling.attn_factor", float, 1.0)
                given *= self.own("rope.scaling.yarn_attn_factor", float, 1.0)
                return YarnRope(
                    factor=factor,
                    original_context_tokens=self.own("rope.scaling.original_context_length", int, trained_tokens),
                    attention_factor=given * yarn_attention_factor(factor),
                    beta_fast=self.own("rope.scaling.yarn_beta_fast", float, DEFAULT_BETA_FAST),
                    beta_slow=self.own("rope.scaling.yarn_beta_slow", float, DEFAULT_BETA_SLOW),
                    truncate=True,
                )
        return None if divisors is None else DividedRope(divisors)

    def _check_key(self, whole: str, key: str) -> None:
        if key in KNOWN_KEYS or key in IDLE_KEYS:
            return
        if key not in ONLY_VALUES:
            raise ModelError(f"{self.path} has {whole} {self._values[whole]!r}, a setting that is not known")
        if self._values[whole] not in ONLY_VALUES[key]:
            raise ModelError(f"{self.path} has {whole} {self._values[whole]!r}; only {ONLY_VALUES[key][0]!r} is served")
