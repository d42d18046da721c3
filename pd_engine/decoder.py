"""A Llama-family decoder over a paged KV pool: all rows of a step in one pass.

Everything here acts on each row by itself (norms, rotary embedding, SiLU), or gives a row the same bits whatever stands
in the others (linear layers on padded rows; attention by its kernel's contract). Where torch's own function is not
row-wise to the last bit, the comment beside it says what is done instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own custom)
from torch import Tensor

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled
from pd_engine.attention import AttentionKernel
from pd_engine.pool import KvPool
from pd_engine.rotary import Floats, rotary_tables
from pd_engine.step_plan import StepPlan, pad_rows, plan_step
from pd_engine.weights import LayerWeights, Linear, Weights
from pd_model.manifest import ModelManifest


class Decoder:
    """Weights and kernel, without a pool: the pool comes in with each call."""

    def __init__(self, manifest: ModelManifest, weights: Weights, kernel: AttentionKernel) -> None:
        self.manifest = manifest
        self.kernel = kernel
        self._weights = weights
        self._dtype = weights.embedding.dtype
        self._cos, self._sin = _paired(rotary_tables(manifest), weights.embedding.device)

    @property
    def device(self) -> torch.device:
        """Where the weights lie; a pool has to lie there too."""
        return self._weights.embedding.device

    def shallow(self, num_layers: int) -> Decoder:
        """The same decoder with its first layers alone."""
        shallow = copy.copy(self)
        shallow.manifest = msgspec.structs.replace(self.manifest, num_layers=min(num_layers, self.manifest.num_layers))
        w = self._weights
        shallow._weights = Weights(w.embedding, w.layers[:num_layers], w.norm, w.head)
        return shallow

    def forward(
        self,
        steps: Sequence[SequenceStep],
        picked: Sequence[int],
        pool: KvPool,
        is_cancelled: Callable[[], bool],
    ) -> Tensor:
        """Runs checked steps, writes their KV, returns float32 logits [len(picked), vocab].

        picked: numbers of the steps whose last row's logits are wanted
        Raises Cancelled between layers; KV of the steps' own positions is undefined then.
        """
        with torch.inference_mode():
            plan = plan_step(steps, self.kernel, self.manifest.num_heads, pool)
            pool.zero(plan.entered)
            hidden = self._run_layers(plan, pool, is_cancelled)
            if not picked:
                return hidden.new_empty((0, self.manifest.vocab_size), dtype=torch.float32)
            rows = pad_rows([plan.last_rows[index] for index in picked], self._dtype).to(self.device)
            last = self._norm(hidden.index_select(0, rows), self._weights.norm)
            return F.linear(last, self._weights.head)[: len(picked)].float()

    def _run_layers(self, plan: StepPlan, pool: KvPool, is_cancelled: Callable[[], bool]) -> Tensor:
        cos = self._cos.index_select(0, plan.positions)[:, None]
        sin = self._sin.index_select(0, plan.positions)[:, None]
        hidden = F.embedding(plan.ids, self._weights.embedding)
        for number, layer in enumerate(self._weights.layers):
            if is_cancelled():
                raise Cancelled(f"stopped before layer {number} of a step")
            hidden = hidden + self._attention(hidden, layer, number, plan, pool, cos, sin)
            hidden = hidden + self._mlp(hidden, layer)
        return hidden

    def _attention(
        self,
        hidden: Tensor,
        layer: LayerWeights,
        number: int,
        plan: StepPlan,
        pool: KvPool,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        m = self.manifest
        num_rotated = m.num_heads + m.num_kv_heads
        qkv = linear(self._norm(hidden, layer.attention_norm), layer.qkv).view(hidden.shape[0], -1, m.head_dim)
        unrotated = qkv[:, :num_rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = qkv[:, : m.num_heads], qkv[:, m.num_heads : num_rotated]
            unrotated = torch.cat([self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)], dim=1)
        rotated = rotate(unrotated, cos, sin)
        keys, values = rotated[: plan.num_rows, m.num_heads :], qkv[: plan.num_rows, num_rotated:]
        written = torch.stack([keys, values], dim=2).view(-1, m.head_dim)
        pool.token_rows(number).index_copy_(0, plan.kv_rows, written)
        seen = plan.attention.attend(rotated[:, : m.num_heads], pool.block_rows(number))
        return linear(seen, layer.output)

    def _mlp(self, hidden: Tensor, layer: LayerWeights) -> Tensor:
        gate, up = linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return linear(silu(gate).mul_(up), layer.down)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(rows, (rows.shape[-1],), weight, self.manifest.rms_norm_eps)


def linear(rows: Tensor, weights: Linear) -> Tensor:
    """A bias is added to the product before it is rounded."""
    return F.linear(rows, weights.matrix, weights.bias)


def _paired(tables: tuple[Floats, Floats], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables for both halves of a head, [context_tokens, head_dim]; sin's first half is negative (see `rotate`)."""
    cos, sin = tables
    return (
        torch.from_numpy(np.concatenate([cos, cos], axis=1)).to(device),
        torch.from_numpy(np.concatenate([-sin, sin], axis=1)).to(device),
    )


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, head_dim]; float32 inside, rounded once. cos, sin: [rows, 1, head_dim]"""
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    # two products and a sum, each rounded by itself: a fused multiply-add would be used by some lanes and not by others
    return (wide * cos).add_(torch.cat([second, first], dim=-1).mul_(sin)).to(heads.dtype)


def silu(gate: Tensor) -> Tensor:
    """x * sigmoid(x), the same bits wherever an element stands.

    F.silu has another float32 formula for the elements left over by its vectors, and threads decide which those are.
    In bfloat16 both formulas round to the same value for all 65,280 finite inputs.
    """
    if gate.dtype == torch.float32:
        return gate / torch.exp(-gate).add_(1.0)
    return F.silu(gate)
