from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import CHAT_TEMPLATE, MANIFEST, Weights, write_gguf

from pd_core.errors import ModelError
from pd_model.folder import open_model
from pd_model.gguf_source import GgufSource, unpermute_heads
from pd_model.tokenizer import load_tokenizer


def test_a_gguf_file_gives_back_the_weights_settings_and_template_it_was_made_of(
    tiny_gguf: Path, weights: Weights, cache_dir: Path
) -> None:
    folder = open_model(str(tiny_gguf), cache_dir)
    assert folder.name == "tiny"
    assert folder.manifest == MANIFEST
    assert folder.chat_template == CHAT_TEMPLATE
    assert folder.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    stored = load_file(folder.weights_path)
    assert stored.keys() == weights.keys()
    for name, tensor in weights.items():
        assert stored[name].dtype == np.float32
        np.testing.assert_array_equal(stored[name], tensor, err_msg=name)


def test_rows_of_a_head_are_put_back_in_two_halves() -> None:
    # x0 y0 x1 y1 | x2 y2 x3 y3  ->  x0 x1 y0 y1 | x2 x3 y2 y3
    rows = np.array([[0], [10], [1], [11], [2], [12], [3], [13]], np.float32)
    assert unpermute_heads(rows, 2).ravel().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.expert_count": 8}, "llama.expert_count 8: mixtures of experts"),
        ({"llama.attention.sliding_window": 32}, "llama.attention.sliding_window 32"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv 8.0, a setting that is not known"),
        ({"llama.attention.causal": False}, "llama.attention.causal False; only True"),
        ({"general.type": "adapter"}, "general.type 'adapter'"),
        ({"split.count": 3}, "split.count 3"),
        ({"llama.rope.freq_base": "high"}, "'high' for llama.rope.freq_base"),
        ({"llama.attention.key_length": 24}, "heads of 24"),
        ({"llama.attention.value_length": 8}, "values of 8"),
    ],
)
def test_a_variant_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, weights: Weights, extra: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        GgufSource(write_gguf(tmp_path / "variant.gguf", weights, extra=extra))


def test_another_architecture_is_refused_by_name(tmp_path: Path, weights: Weights) -> None:
    with pytest.raises(ModelError, match="gemma2"):
        GgufSource(write_gguf(tmp_path / "other.gguf", weights, architecture="gemma2"))


def test_an_unknown_pre_tokenizer_is_refused_rather_than_guessed(tmp_path: Path, weights: Weights) -> None:
    source = GgufSource(write_gguf(tmp_path / "other.gguf", weights, pre="tekken"))
    with pytest.raises(ModelError, match="tekken"):
        _ = source.tokenizer_json


def test_a_missing_tensor_is_named(tmp_path: Path, weights: Weights, cache_dir: Path) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "short.gguf", weights)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        open_model(str(path), cache_dir)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path, weights: Weights, cache_dir: Path) -> None:
    weights["model.norm.weight"] = np.ones(16, np.float32)
    path = write_gguf(tmp_path / "wrong.gguf", weights)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(16,\)"):
        open_model(str(path), cache_dir)
    assert not list((cache_dir / "models").glob(".tmp-*"))


@pytest.mark.parametrize("kept", [0, 3, 8, 100, 5000, 0.5, 0.99])
def test_a_truncated_file_is_an_error_wherever_it_ends(tiny_gguf: Path, cache_dir: Path, kept: float) -> None:
    whole = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(ModelError, match="GGUF"):
        open_model(str(tiny_gguf), cache_dir)


def test_a_file_of_garbage_is_an_error(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(np.random.default_rng(1).bytes(4096))
    with pytest.raises(ModelError, match="GGUF"):
        open_model(str(path), cache_dir)


def test_a_special_token_beyond_the_tokens_is_named(tmp_path: Path, weights: Weights, cache_dir: Path) -> None:
    wider = weights | {
        "model.embed_tokens.weight": np.ones((MANIFEST.vocab_size + 1, MANIFEST.hidden_size), np.float32)
    }
    extra = {"tokenizer.ggml.eos_token_id": MANIFEST.vocab_size}
    path = write_gguf(tmp_path / "beyond.gguf", wider, extra=extra)
    with pytest.raises(ModelError, match=rf"ids outside of them: {{'eos': {MANIFEST.vocab_size}}}"):
        open_model(str(path), cache_dir)


def test_control_tokens_become_special_and_merges_are_kept(tiny_gguf: Path, cache_dir: Path) -> None:
    tokenizer = load_tokenizer(open_model(str(tiny_gguf), cache_dir))
    assert tokenizer.special_texts == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert tokenizer.encode("<|im_end|>") == [2]
    assert [tokenizer.token_text(token) for token in tokenizer.encode("hehh")] == ["he", "h", "h"]
