"""What a model is: its sizes and settings, apart from where its weights lie."""

from __future__ import annotations

import hashlib

import msgspec

from pd_core.errors import ModelError

NOT_IN_KV = frozenset({"vocab_size", "context_tokens", "tied_embeddings", "eos_token_ids", "bos_token_id"})
"""Fields that leave the KV of a given run of tokens as it is; every other one is part of the settings digest."""


class ModelManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder of the Llama family.

    context_tokens:  most positions that the model was trained for
    tied_embeddings: the output head is the embedding; no lm_head.weight is stored
    eos_token_ids:   any of them ends a text
    bos_token_id:    the token that chat templates know as `bos_token`; nothing puts it in front on its own
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    eos_token_ids: list[int]
    bos_token_id: int | None


def check_manifest(manifest: ModelManifest) -> None:
    """Raises ModelError for values that no Llama can have, naming the field."""
    try:
        msgspec.convert(msgspec.to_builtins(manifest), ModelManifest)
    except msgspec.ValidationError as error:
        raise ModelError(f"a setting of the model is of the wrong kind: {error}") from error
    if manifest.architecture != "llama":
        raise ModelError(f"architecture {manifest.architecture!r} is not supported yet; only 'llama' is")
    for field in (
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "context_tokens",
    ):
        if getattr(manifest, field) < 1:
            raise ModelError(f"the model's {field} is {getattr(manifest, field)}; it must be at least 1")
    if manifest.num_heads % manifest.num_kv_heads:
        raise ModelError(f"the model's {manifest.num_heads} heads cannot share {manifest.num_kv_heads} KV heads evenly")
    if manifest.head_dim % 2:
        raise ModelError(f"the model's head_dim is {manifest.head_dim}; rotary embedding needs an even one")
    if not (manifest.rms_norm_eps > 0 and manifest.rope_theta > 0):
        raise ModelError(f"rms_norm_eps {manifest.rms_norm_eps} and rope_theta {manifest.rope_theta} must be above 0")
    special = [*manifest.eos_token_ids, *([] if manifest.bos_token_id is None else [manifest.bos_token_id])]
    outside = [token for token in special if not 0 <= token < manifest.vocab_size]
    if outside:
        raise ModelError(f"token ids {outside} are outside the vocabulary of {manifest.vocab_size}")


def settings_digest(manifest: ModelManifest) -> str:
    """Digest (hex) over every setting that changes KV. A new field counts unless NOT_IN_KV names it."""
    settings = {field: getattr(manifest, field) for field in ModelManifest.__struct_fields__ if field not in NOT_IN_KV}
    return hashlib.blake2b(msgspec.json.encode(settings, order="sorted"), digest_size=16).hexdigest()


def tensor_shapes(manifest: ModelManifest) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model has: Hugging Face's Llama names, `[out, in]` for matrices."""
    hidden, inner = manifest.hidden_size, manifest.intermediate_size
    q_rows = manifest.num_heads * manifest.head_dim
    kv_rows = manifest.num_kv_heads * manifest.head_dim
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (manifest.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(manifest.num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in in_layer.items()}
    if not manifest.tied_embeddings:
        shapes["lm_head.weight"] = (manifest.vocab_size, hidden)
    return shapes
