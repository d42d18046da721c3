"""A model as GGUF file and as Hugging Face folder: the same weights under the same names, and the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_gguf import llama3_divisors, write_family_gguf
from family_models import CASES, LLAMA3, Case, make_model, write_folder

from pd_core.errors import ModelError
from pd_model.folder import ModelFolder, open_model
from pd_model.manifest import QUERY
from pd_model.rope import DividedRope
from pd_model.tokenizer import load_tokenizer

Q8_0, Q4_0, F16, BF16 = (getattr(gguf.GGMLQuantizationType, kind) for kind in ("Q8_0", "Q4_0", "F16", "BF16"))
PLAIN = [name for name in CASES if "all it may say" not in name and "mscale" not in name and "llama3" not in name]
"""Those whose settings GGUF can say in the same words."""


def both(tmp_path: Path, case: Case) -> tuple[ModelFolder, ModelFolder]:
    model = make_model(case)
    folder = open_model(str(write_folder(tmp_path / "hf", model)), tmp_path / "cache")
    return folder, open_model(str(write_family_gguf(tmp_path / "model.gguf", model)), tmp_path / "cache")


@pytest.mark.parametrize("name", PLAIN)
def test_weights_and_settings_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    from_folder, from_gguf = both(tmp_path, CASES[name])
    assert from_gguf.weights_digest == from_folder.weights_digest
    assert from_gguf.settings_digest == from_folder.settings_digest
    assert from_gguf.manifest.tied_embeddings == from_folder.manifest.tied_embeddings
    assert from_gguf.manifest.context_tokens == from_folder.manifest.context_tokens
    assert load_tokenizer(from_gguf).encode("he said: <|im_end|>") == load_tokenizer(from_folder).encode(
        "he said: <|im_end|>"
    )


def test_llama3_rope_is_kept_as_what_it_divides_by(tmp_path: Path) -> None:
    from_folder, from_gguf = both(tmp_path, CASES["llama llama3 rope"])
    assert from_gguf.weights_digest == from_folder.weights_digest
    assert from_gguf.manifest.rope_scaling == DividedRope([float(value) for value in llama3_divisors(LLAMA3, 16)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_quantised_weights_are_those_of_a_folder_with_the_dequantised_ones(tmp_path: Path, family: str) -> None:
    """Interleaved rows are quantised as they lie, so dequantised they are put back in order: nothing is mixed."""
    model = make_model(Case(family, {"hidden_size": 64, "head_dim": 32}))
    kinds = {"q_proj.weight": Q8_0, "k_proj.weight": Q4_0, "up_proj.weight": Q8_0, "down_proj.weight": BF16}
    kinds["embed_tokens.weight"] = F16
    found = open_model(str(write_family_gguf(tmp_path / "m.gguf", model, kinds)), tmp_path / "cache")
    state = model.state_dict()
    for name, tensor in state.items():
        kind = next((kind for end, kind in kinds.items() if name.endswith(end)), None)
        if kind is not None:
            values = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
            state[name] = torch.from_numpy(np.array(values)).to(torch.float16 if kind is F16 else torch.bfloat16)
    folder = write_folder(tmp_path / "hf", model)
    save_as(folder / "model.safetensors", state)
    assert open_model(str(folder), tmp_path / "cache").weights_digest == found.weights_digest


def save_as(path: Path, state: dict[str, Any]) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def test_qwen2_without_its_biases_is_refused(tmp_path: Path) -> None:
    model = make_model(CASES["qwen2"])
    for name, parameter in list(model.named_parameters()):
        if name.endswith(f"{QUERY}.bias"):
            parent = model.get_submodule(name.rpartition(".")[0])
            parent.bias = None
            assert parameter is not None
    with pytest.raises(ModelError, match=r"lacks tensors: blk\.0\.attn_q\.bias, blk\.1\.attn_q\.bias"):
        open_model(str(write_family_gguf(tmp_path / "m.gguf", model)), tmp_path / "cache")


def test_a_bias_in_one_layer_alone_is_refused(tmp_path: Path) -> None:
    model = make_model(CASES["llama"])
    model.get_submodule("model.layers.1.mlp.up_proj").bias = torch.nn.Parameter(torch.ones(96))
    with pytest.raises(ModelError, match=r"does not use: blk\.1\.ffn_up\.bias"):
        open_model(str(write_family_gguf(tmp_path / "m.gguf", model)), tmp_path / "cache")


def test_divisors_are_for_llama_alone(tmp_path: Path) -> None:
    model = make_model(Case("qwen2", {"rope_parameters": LLAMA3}))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        open_model(str(write_family_gguf(tmp_path / "m.gguf", model)), tmp_path / "cache")


def test_a_type_that_is_not_read_is_named_with_its_tensor_and_file(tmp_path: Path) -> None:
    model = make_model(Case("llama", {"intermediate_size": 256}))
    path = write_family_gguf(tmp_path / "m.gguf", model, {"down_proj.weight": gguf.GGMLQuantizationType.TQ2_0})
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down\.weight in .*m\.gguf is TQ2_0; types that are read: F32"):
        open_model(str(path), tmp_path / "cache")
