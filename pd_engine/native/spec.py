"""What the native kernels need to know of a model, and where they must say no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pd_core.layout import BlockLayout, DType

WeightForm: TypeAlias = Literal["dtype", "int8"]

LAYOUT_NAME = "stepwise"
"""In steps of 64 bytes: K `[head_dim / pack][16 tokens][pack]`, V `[16 tokens / pack][head_dim][pack]`; pack is 1 in
float32 and 2 in bfloat16."""

LANES = 16
MAX_HEAD_DIM = 256
MAX_GROUP = 256


@dataclass(frozen=True, slots=True)
class NativeSpec:
    """Sizes and settings.

    attention_scale: None for head_dim ** -0.5
    weights:         "dtype" multiplies with weights of `dtype`; "int8" keeps the matrices in 8 bits and a scale a row
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    dtype: DType
    rms_norm_eps: float
    tied_embeddings: bool
    attention_scale: float | None = None
    weights: WeightForm = "dtype"

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(LAYOUT_NAME, self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    def refusal(self) -> str | None:
        """None when the kernels can run this model, else a sentence that names the size that is in the way."""
        if self.dtype not in ("float32", "bfloat16"):
            return f"native kernels run in float32 and bfloat16, not in {self.dtype}"
        for name in ("hidden_size", "intermediate_size", "head_dim"):
            if getattr(self, name) % LANES:
                return f"native kernels need a {name} that is a multiple of {LANES}; it is {getattr(self, name)}"
        if self.head_dim > MAX_HEAD_DIM:
            return f"native kernels go up to a head_dim of {MAX_HEAD_DIM}; it is {self.head_dim}"
        if self.num_heads > MAX_GROUP * self.num_kv_heads:
            return (
                f"native kernels let {MAX_GROUP} heads share a KV head; here {self.num_heads // self.num_kv_heads} do"
            )
        return None
