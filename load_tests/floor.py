"""The least time that this machine could take for a step of this model, from what it was measured to do. Pure.

    prefill floor   the GEMMs of all layers and causal attention, at the GEMM rate
    decode floor    the slower of: every weight and the batch's KV read once, at the read bandwidth;
                    all multiplications, at the GEMM rate

The embedding is no GEMM, and the head is one row of a prompt: neither counts for prefill. For decode the head counts
like a layer.
"""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True):
    """The sizes that decide how long a step takes. number_bytes: bytes of a weight, and of a number of KV."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    number_bytes: int

    @property
    def gemms(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the matrices of one layer: QKV, attention's output, gate and up, down."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (self.hidden_size, q_size + 2 * kv_size),
            (q_size, self.hidden_size),
            (self.hidden_size, 2 * self.intermediate_size),
            (self.intermediate_size, self.hidden_size),
        ]

    @property
    def num_layer_weights(self) -> int:
        """Of all layers together."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.gemms)

    @property
    def num_head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def kv_token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.number_bytes

    def attention_flops(self, num_keys: int) -> int:
        """One query row over so many keys, in all layers: scores and weighted values."""
        return 4 * self.num_heads * self.head_dim * self.num_layers * num_keys


class Rates(msgspec.Struct, frozen=True):
    """What the machine was measured to do: floating point operations and bytes read, in a second."""

    flops_per_s: float
    read_bytes_per_s: float


def prefill_floor_s(shape: ModelShape, rates: Rates, num_tokens: int) -> float:
    """A prompt of so many tokens, from position 0."""
    linear = 2 * shape.num_layer_weights * num_tokens
    attention = shape.attention_flops(num_tokens * (num_tokens + 1) // 2)
    return (linear + attention) / rates.flops_per_s


def decode_floor_s(shape: ModelShape, rates: Rates, num_streams: int, context_tokens: int) -> float:
    """One step of so many streams that have `context_tokens` positions each and add one."""
    num_keys = context_tokens + 1
    num_weights = shape.num_layer_weights + shape.num_head_weights
    num_bytes = num_weights * shape.number_bytes + num_streams * num_keys * shape.kv_token_bytes
    flops = num_streams * (2 * num_weights + shape.attention_flops(num_keys))
    return max(num_bytes / rates.read_bytes_per_s, flops / rates.flops_per_s)
