from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tiny_models import MANIFEST

from pd_core.errors import ModelError
from pd_model.manifest import ModelManifest, check_manifest, settings_digest, tensor_shapes
from pd_model.rope import LinearRope

CHANGES_KV: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10001.0,
    "qk_norm": True,
    "biases": ["self_attn.q_proj"],
    "rope_scaling": LinearRope(2.0),
}
LEAVES_KV: dict[str, Any] = {
    "architecture": "mistral",
    "vocab_size": 300,
    "context_tokens": 64,
    "tied_embeddings": False,
    "eos_token_ids": [0],
    "bos_token_id": None,
}


@pytest.mark.parametrize("field", CHANGES_KV)
def test_a_setting_that_changes_kv_changes_the_settings_digest(field: str) -> None:
    changed = replace(MANIFEST, **{field: CHANGES_KV[field]})
    assert settings_digest(changed) != settings_digest(MANIFEST)


@pytest.mark.parametrize("field", LEAVES_KV)
def test_a_setting_that_leaves_kv_alone_leaves_the_settings_digest_alone(field: str) -> None:
    changed = replace(MANIFEST, **{field: LEAVES_KV[field]})
    assert settings_digest(changed) == settings_digest(MANIFEST)


def test_every_field_is_known_either_to_change_kv_or_not_to() -> None:
    assert CHANGES_KV.keys() | LEAVES_KV.keys() == set(ModelManifest.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "gemma"),
        ("biases", ["self_attn.v_proj", "self_attn.q_proj"]),
        ("biases", ["lm_head"]),
        ("num_layers", 0),
        ("num_kv_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", 0.0),
        ("rope_theta", float("nan")),
        ("eos_token_ids", [10**6]),
        ("bos_token_id", -1),
        ("bos_token_id", "<s>"),
        ("hidden_size", 32.5),
    ],
)
def test_a_value_that_no_llama_can_have_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ModelError):
        check_manifest(replace(MANIFEST, **{field: value}))


def test_only_an_untied_model_has_a_head_of_its_own() -> None:
    assert "lm_head.weight" not in tensor_shapes(MANIFEST)
    untied = tensor_shapes(replace(MANIFEST, tied_embeddings=False))
    assert untied["lm_head.weight"] == (MANIFEST.vocab_size, MANIFEST.hidden_size)
    assert len(untied) == 2 * 9 + 3


def test_biases_and_norms_of_heads_have_tensors() -> None:
    more = tensor_shapes(replace(MANIFEST, qk_norm=True, biases=["self_attn.k_proj", "mlp.down_proj"]))
    assert more.items() > tensor_shapes(MANIFEST).items()
    assert {name: shape for name, shape in more.items() if name not in tensor_shapes(MANIFEST) and ".1." in name} == {
        "model.layers.1.self_attn.q_norm.weight": (16,),
        "model.layers.1.self_attn.k_norm.weight": (16,),
        "model.layers.1.self_attn.k_proj.bias": (16,),
        "model.layers.1.mlp.down_proj.bias": (32,),
    }
