"""What a config.json may say, and the sentence that refuses the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_models import CASES, CONTEXT_TOKENS, Case, make_model, write_folder
from tiny_models import HF_CONFIG, Weights, write_hf_folder

from pd_core.errors import ModelError
from pd_model.folder import open_model
from pd_model.hf_settings import FAMILIES, RULES, Family, find_biases, find_family, find_refusal, find_window
from pd_model.hf_source import HfSource
from pd_model.manifest import LINEARS

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "settings", "refusal"),
    [
        # layer_types, use_sliding_window, sliding_window, context 100
        ("llama", {}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 100}, None),
        ("mistral", {"sliding_window": 99}, "sliding_window 99 in a context of 100"),
        ("mistral", {"sliding_window": 99, "layer_types": [FULL, FULL]}, "sliding_window 99"),
        ("llama", {"sliding_window": 32}, "sliding_window 32"),
        ("qwen2", {"sliding_window": 32}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True}, "use_sliding_window true and sliding_window 32"),
        ("qwen3", {"sliding_window": 100, "use_sliding_window": True}, None),
        ("qwen3", {"sliding_window": 32, "layer_types": [FULL, FULL]}, None),
        ("qwen3", {"sliding_window": 32, "layer_types": [FULL, SLIDING]}, "layer_types with 'sliding_attention' and"),
        (
            "qwen2",
            {"sliding_window": 32, "use_sliding_window": False, "layer_types": [SLIDING, FULL]},
            "use_sliding_window false and sliding_window 32",
        ),
        ("qwen3", {"layer_types": [FULL, SLIDING]}, "layer_types with 'sliding_attention', which is not served"),
        ("qwen3", {"layer_types": [SLIDING], "sliding_window": 100}, None),
        ("qwen3", {"layer_types": [FULL, "chunked_attention"]}, "layer_types with 'chunked_attention'"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window 'wide'"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0"),
        ("mistral", {"sliding_window": True}, "sliding_window True"),
    ],
)
def test_a_window_is_refused_when_it_is_in_use(family: str, settings: dict[str, Any], refusal: str | None) -> None:
    found = find_window(settings, FAMILIES[family], 100)
    assert found is None if refusal is None else found is not None and refusal in found


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
        Case("qwen3", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
        Case("mistral", {"sliding_window": 32}),
    ],
    ids=lambda case: case.family,
)
def test_a_model_that_mixes_windows_and_full_attention_is_not_started(tmp_path: Path, case: Case) -> None:
    """Served with the window in every layer, or in none, it would forget, or see, what it must not."""
    folder = write_folder(tmp_path / "mixed", make_model(case))
    with pytest.raises(ModelError, match=rf"{folder}/config\.json has .*sliding_window 32 in a context of 640"):
        open_model(str(folder), tmp_path / "cache")
    assert not (tmp_path / "cache" / "models").exists() or not list((tmp_path / "cache" / "models").glob("*/*"))


@pytest.mark.parametrize("setting", list(RULES))
def test_every_rule_serves_what_it_says_and_refuses_the_rest_by_name_and_value(setting: str) -> None:
    family = Family("M", False, (), {}, None, False)
    for value in RULES[setting].served:
        assert find_refusal({setting: value}, family, 100) is None
    assert find_refusal({}, family, 100) is None
    refusal = find_refusal({setting: "odd"}, family, 100)
    assert refusal == f"{setting} 'odd': {RULES[setting].why}"


@pytest.mark.parametrize(
    ("family", "settings", "biased"),
    [
        ("llama", {}, []),
        ("llama", {"attention_bias": True}, LINEARS[:4]),
        ("llama", {"mlp_bias": True}, LINEARS[4:]),
        ("llama", {"mlp_bias": True, "attention_bias": True}, LINEARS),
        ("mistral", {}, []),
        ("qwen2", {}, LINEARS[:3]),
        ("qwen3", {"attention_bias": False}, []),
        ("qwen3", {"attention_bias": True}, LINEARS[:4]),
    ],
)
def test_which_linears_have_a_bias(family: str, settings: dict[str, Any], biased: list[str]) -> None:
    assert find_biases(settings, FAMILIES[family]) == list(biased)


@pytest.mark.parametrize(("family", "setting"), [("mistral", "attention_bias"), ("qwen2", "mlp_bias")])
def test_biases_of_another_family_are_refused(family: str, setting: str) -> None:
    assert f"{setting} True" in str(find_refusal({setting: True}, FAMILIES[family], 100))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'; families that are served: llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({}, "model_type None"),
        ({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]}, "only Qwen2ForCausalLM is served"),
    ],
)
def test_other_families_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    assert named in str(find_family(config))


def test_qwen3_has_heads_of_128_where_its_config_names_none(tmp_path: Path, weights: Weights) -> None:
    settings = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    manifest = HfSource(write_hf_folder(tmp_path / "q", weights, **settings)).manifest
    assert (manifest.head_dim, manifest.qk_norm, manifest.architecture) == (128, True, "qwen3")
    assert HfSource(write_hf_folder(tmp_path / "l", weights)).manifest.head_dim == 16


@pytest.mark.parametrize("name", list(CASES))
def test_a_config_that_transformers_wrote_is_read_as_it_was_meant(tmp_path: Path, name: str) -> None:
    model = make_model(CASES[name])
    manifest = HfSource(write_folder(tmp_path / "m", model)).manifest
    assert manifest.architecture == CASES[name].family
    assert manifest.tied_embeddings == CASES[name].settings.get("tie_word_embeddings", False)
    assert manifest.context_tokens == CONTEXT_TOKENS
    biased = {key.removesuffix(".bias").split(".", 3)[3] for key in model.state_dict() if key.endswith(".bias")}
    assert set(manifest.biases) == biased
    assert manifest.qk_norm == any("q_norm" in key for key in model.state_dict())


def test_old_configs_say_the_same_in_other_words(tmp_path: Path, weights: Weights) -> None:
    old = write_hf_folder(tmp_path / "old", weights, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = write_hf_folder(
        tmp_path / "new", weights, rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 500000}
    )
    assert HfSource(old).manifest == HfSource(new).manifest
    assert json.loads((old / "config.json").read_text())["rope_theta"] == 5e5
    assert HF_CONFIG["rope_theta"] != 5e5
