"""What a model is: its sizes and settings, apart from where its weights lie."""

from __future__ import annotations

import hashlib

import msgspec

from pd_core.errors import ModelError
from pd_model.rope import RopeScaling, check_rope_scaling

NOT_IN_KV = frozenset(
    {"architecture", "vocab_size", "context_tokens", "tied_embeddings", "eos_token_ids", "bos_token_id"}
)
"""Fields that leave the KV of a given run of tokens as it is; every other one is part of the settings digest."""

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

QUERY, KEY, VALUE, OUTPUT = (f"self_attn.{part}_proj" for part in ("q", "k", "v", "o"))
GATE, UP, DOWN = (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
LINEARS = (QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN)
"""The matrices of a layer, by Hugging Face's names."""
QUERY_NORM, KEY_NORM = "self_attn.q_norm", "self_attn.k_norm"


class ModelManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder of the Llama family.

    architecture:    the family, for people: whatever tells its members apart is a field of its own
    context_tokens:  most positions that the model was trained for
    tied_embeddings: the output head is the embedding; no lm_head.weight is stored
    eos_token_ids:   any of them ends a text
    bos_token_id:    the token that chat templates know as `bos_token`; nothing puts it in front on its own
    qk_norm:         each head of q and k is normed before it is rotated
    biases:          those of LINEARS that add a bias, in their order
    rope_scaling:    None leaves the rotary frequencies as they are
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
    qk_norm: bool = False
    biases: list[str] = []
    rope_scaling: RopeScaling | None = None


def check_manifest(manifest: ModelManifest) -> None:
    """Raises ModelError for values that no model of the family can have, naming the field."""
    try:
        msgspec.convert(msgspec.to_builtins(manifest), ModelManifest)
    except msgspec.ValidationError as error:
        raise ModelError(f"a setting of the model is of the wrong kind: {error}") from error
    if manifest.architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {manifest.architecture!r} is not served; those that are: {', '.join(ARCHITECTURES)}"
        )
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
    if manifest.biases != [name for name in LINEARS if name in manifest.biases]:
        raise ModelError(f"the model's biases are {manifest.biases}; each of {', '.join(LINEARS)} may stand there once")
    if manifest.rope_scaling is not None:
        check_rope_scaling(manifest.rope_scaling, manifest.head_dim)


def settings_digest(manifest: ModelManifest) -> str:
    """Digest (hex) over every setting that changes KV. A new field counts unless NOT_IN_KV names it."""
    settings = {field: getattr(manifest, field) for field in ModelManifest.__struct_fields__ if field not in NOT_IN_KV}
    return hashlib.blake2b(msgspec.json.encode(settings, order="sorted"), digest_size=16).hexdigest()


def tensor_shapes(manifest: ModelManifest) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model has: Hugging Face's Llama names, `[out, in]` for matrices."""
    hidden, inner = manifest.hidden_size, manifest.intermediate_size
    q_rows = manifest.num_heads * manifest.head_dim
    kv_rows = manifest.num_kv_heads * manifest.head_dim
    linears = {
        QUERY: (q_rows, hidden),
        KEY: (kv_rows, hidden),
        VALUE: (kv_rows, hidden),
        OUTPUT: (hidden, q_rows),
        GATE: (inner, hidden),
        UP: (inner, hidden),
        DOWN: (hidden, inner),
    }
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    in_layer |= {f"{name}.weight": shape for name, shape in linears.items()}
    in_layer |= {f"{name}.bias": linears[name][:1] for name in manifest.biases}
    if manifest.qk_norm:
        in_layer |= {f"{name}.weight": (manifest.head_dim,) for name in (QUERY_NORM, KEY_NORM)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (manifest.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(manifest.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in in_layer.items()}
    if not manifest.tied_embeddings:
        shapes["lm_head.weight"] = (manifest.vocab_size, hidden)
    return shapes
