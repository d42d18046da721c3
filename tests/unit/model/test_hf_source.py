from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from tiny_models import CHAT_TEMPLATE, HF_CONFIG, MANIFEST, Weights, make_weights, write_hf_folder
from transformers import LlamaConfig, LlamaForCausalLM

from pd_core.errors import ModelError
from pd_model.folder import open_model
from pd_model.hf_source import HfSource
from pd_model.safetensors_file import read_header


def write_bfloat16(path: Path, weights: Weights) -> Weights:
    """Stores the upper halves of the weights by hand; returns the values that these stand for."""
    header, data, expected = {}, b"", {}
    for name, tensor in weights.items():
        halves = (tensor.view(np.uint32) >> 16).astype(np.uint16)
        expected[name] = (halves.astype(np.uint32) << 16).view(np.float32)
        end = len(data) + halves.nbytes
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [len(data), end]}
        data += halves.tobytes()
    encoded = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return expected


def test_a_folder_gives_its_weights_settings_and_template(tiny_hf: Path, weights: Weights, cache_dir: Path) -> None:
    folder = open_model(str(tiny_hf), cache_dir)
    assert folder.name == "tiny-hf"
    assert folder.manifest == MANIFEST
    assert folder.chat_template == CHAT_TEMPLATE
    assert folder.template_tokens == {"eos_token": "<|im_end|>"}
    for name, tensor in load_file(folder.weights_path).items():
        np.testing.assert_array_equal(tensor, weights[name])


def test_a_folder_that_transformers_wrote_is_read(tiny_hf: Path, tmp_path: Path, cache_dir: Path) -> None:
    config = LlamaConfig(**{key: value for key, value in HF_CONFIG.items() if key != "rope_scaling"})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    shutil.copy(tiny_hf / "tokenizer.json", tmp_path / "theirs")
    folder = open_model(str(tmp_path / "theirs"), cache_dir)
    assert folder.manifest == MANIFEST
    assert folder.chat_template is None
    theirs = model.state_dict()
    for name, tensor in load_torch_file(folder.weights_path).items():
        assert torch.equal(tensor, theirs[name])


def test_the_same_model_as_gguf_and_as_folder_has_the_same_digests(
    tiny_hf: Path, tiny_gguf: Path, cache_dir: Path
) -> None:
    from_folder, from_gguf = open_model(str(tiny_hf), cache_dir), open_model(str(tiny_gguf), cache_dir)
    assert from_folder.weights_digest == from_gguf.weights_digest
    assert from_folder.settings_digest == from_gguf.settings_digest


def test_shards_are_read_as_one_model(tiny_hf: Path, weights: Weights, cache_dir: Path) -> None:
    names = sorted(weights)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, members in shards.items():
        save_file({name: weights[name] for name in members}, tiny_hf / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (tiny_hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = write_hf_folder(tiny_hf.parent / "whole", weights)
    assert open_model(str(tiny_hf), cache_dir).weights_digest == open_model(str(whole), cache_dir).weights_digest
    (tiny_hf / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        open_model(str(tiny_hf), cache_dir)


def test_an_index_cannot_point_outside_its_folder(tiny_hf: Path, cache_dir: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tiny_hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its folder"):
        open_model(str(tiny_hf), cache_dir)


def test_bfloat16_weights_are_kept_as_they_are(tiny_hf: Path, weights: Weights, cache_dir: Path) -> None:
    expected = write_bfloat16(tiny_hf / "model.safetensors", weights)
    stored = load_torch_file(open_model(str(tiny_hf), cache_dir).weights_path)
    for name, tensor in expected.items():
        assert stored[name].dtype == torch.bfloat16
        np.testing.assert_array_equal(stored[name].float().numpy(), tensor)


def test_float16_weights_are_kept_as_they_are(tiny_hf: Path, weights: Weights, cache_dir: Path) -> None:
    halves = {name: tensor.astype(np.float16) for name, tensor in weights.items()}
    save_file(halves, tiny_hf / "model.safetensors")
    stored = load_file(open_model(str(tiny_hf), cache_dir).weights_path)
    for name, tensor in halves.items():
        assert stored[name].dtype == np.float16
        np.testing.assert_array_equal(stored[name], tensor)


def test_stored_tensors_of_whole_cache_lines_are_aligned(tiny_hf: Path, cache_dir: Path) -> None:
    entries, data_start = read_header(open_model(str(tiny_hf), cache_dir).weights_path)
    assert data_start % 64 == 0
    assert all((data_start + entry.data_offsets[0]) % 64 == 0 for entry in entries.values())


def test_an_untied_head_is_kept_and_a_tied_one_that_is_stored_anyway_is_not(tmp_path: Path, cache_dir: Path) -> None:
    untied = make_weights(replace(MANIFEST, tied_embeddings=False))
    kept = write_hf_folder(tmp_path / "untied", untied, tie_word_embeddings=False)
    tied = write_hf_folder(tmp_path / "tied", untied, tie_word_embeddings=True)
    assert "lm_head.weight" in load_file(open_model(str(kept), cache_dir).weights_path)
    assert "lm_head.weight" not in load_file(open_model(str(tied), cache_dir).weights_path)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "mixtral"),
        ("model_type", ["llama"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_theta": "1e4"}),
        ("sliding_window", 32),
        ("num_local_experts", 8),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, weights: Weights, cache_dir: Path, setting: str, value: Any
) -> None:
    folder = write_hf_folder(tmp_path / "variant", weights, **{setting: value})
    with pytest.raises(ModelError, match=setting) as refused:
        open_model(str(folder), cache_dir)
    assert str(folder) in refused.value.message
    assert not list((cache_dir / "models").glob("[0-9a-f]*"))


def test_rope_theta_is_found_where_newer_configs_keep_it(tmp_path: Path, weights: Weights) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    folder = write_hf_folder(tmp_path / "newer", weights, rope_parameters=rope)
    assert HfSource(folder).manifest.rope_theta == 500000.0


@pytest.mark.parametrize("value", [None, "576", 1.5, True, []])
def test_a_size_that_is_no_number_is_refused_by_name(tmp_path: Path, weights: Weights, value: Any) -> None:
    folder = write_hf_folder(tmp_path / "odd", weights, hidden_size=value)
    with pytest.raises(ModelError, match="hidden_size"):
        HfSource(folder)


def test_ends_of_text_come_from_the_generation_config_first(tiny_hf: Path) -> None:
    (tiny_hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert HfSource(tiny_hf).manifest.eos_token_ids == [0, 2]


def test_a_chat_template_file_wins_over_the_tokenizer_config(tiny_hf: Path) -> None:
    (tiny_hf / "chat_template.jinja").write_text("own file")
    assert HfSource(tiny_hf).chat_template == "own file"


def test_a_chat_template_that_is_no_utf_8_is_named(tiny_hf: Path, cache_dir: Path) -> None:
    (tiny_hf / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is no UTF-8"):
        open_model(str(tiny_hf), cache_dir)


def test_of_several_chat_templates_the_default_one_is_taken(tiny_hf: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tiny_hf / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert HfSource(tiny_hf).chat_template == "d"


def test_biases_and_other_unknown_tensors_are_refused_by_name(tiny_hf: Path, weights: Weights, cache_dir: Path) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    save_file(weights, tiny_hf / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        open_model(str(tiny_hf), cache_dir)


@pytest.mark.parametrize("kept", [0, 7, 50, -1])
def test_truncated_weights_are_an_error_wherever_they_end(tiny_hf: Path, cache_dir: Path, kept: int) -> None:
    path = tiny_hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="truncated"):
        open_model(str(tiny_hf), cache_dir)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_config_that_is_no_json_is_named(tiny_hf: Path, cache_dir: Path, name: str) -> None:
    (tiny_hf / name).write_text("{")
    with pytest.raises(ModelError, match=name):
        open_model(str(tiny_hf), cache_dir)


@pytest.mark.parametrize("where", ["nothing-here", "nothing.gguf", "."])
def test_a_path_without_a_model_is_an_error_that_names_it(tmp_path: Path, cache_dir: Path, where: str) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        open_model(str(tmp_path / where), cache_dir)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{", "cannot be read"),
        (b"[]", "its JSON is a list"),
        (b"\xff", "utf-8"),
        (b'{"model": {"type": "Unigram"}}', "model is 'Unigram'; only 'BPE'"),
        (b'{"model": {"type": "BPE"}, "decoder": {"type": "WordPiece"}}', "decoder is WordPiece"),
        (b'{"model": {"type": "BPE"}, "decoder": null}', "decoder is None"),
    ],
)
def test_a_tokenizer_that_is_not_served_is_refused_with_its_file_before_anything_is_started(
    tiny_hf: Path, cache_dir: Path, text: bytes, sentence: str
) -> None:
    (tiny_hf / "tokenizer.json").write_bytes(text)
    with pytest.raises(ModelError, match=sentence) as refused:
        open_model(str(tiny_hf), cache_dir)
    assert str(tiny_hf / "tokenizer.json") in refused.value.message
