"""Our logits are those of transformers' LlamaForCausalLM on the same weights, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_engine import TINY_MANIFEST, engine_over, tiny_decoder, write_tiny_weights
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pd_core.engine import SequenceStep
from pd_engine.engine import ModelEngine
from pd_engine.kernels import kernels
from pd_engine.loader import load_engine, plan_engine
from pd_engine.scratch import ScratchMemory
from pd_model.folder import ModelFolder, default_cache_dir
from pd_model.manifest import ModelManifest

TOLERANCE = 1e-3
PROMPTS = {
    "one token": [1],
    "a question": [504, 3575, 282, 4649, 314, 47, 1812, 314, 260, 3575, 282, 8425, 47, 198, 1],
    "past a block": [(7919 * i + 11) % 49_152 for i in range(83)],
    "past a key tile": [(104_729 * i + 3) % 49_152 for i in range(530)],
}


def peer_for(manifest: ModelManifest, weights_path: Path) -> LlamaForCausalLM:
    """transformers' own classes with the manifest's settings and the very tensors that we read."""
    config = LlamaConfig(
        hidden_size=manifest.hidden_size,
        intermediate_size=manifest.intermediate_size,
        num_hidden_layers=manifest.num_layers,
        num_attention_heads=manifest.num_heads,
        num_key_value_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        vocab_size=manifest.vocab_size,
        max_position_embeddings=manifest.context_tokens,
        rms_norm_eps=manifest.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": manifest.rope_theta},
        tie_word_embeddings=manifest.tied_embeddings,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    with torch.device("meta"):
        peer = LlamaForCausalLM(config)
    peer = peer.to_empty(device="cpu")
    tensors = load_file(weights_path)
    if manifest.tied_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    peer.load_state_dict(tensors, strict=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)  # its frequencies are no part of the weights
    return peer.eval()


def ours(engine: ModelEngine, tokens: list[int], ends: list[int]) -> Tensor:
    """Logits after each of `ends` tokens: one chunk up to each."""
    table = list(range(-(-len(tokens) // 16)))
    starts = [0, *ends[:-1]]
    return torch.cat(
        [
            torch.as_tensor(engine.logits([SequenceStep(tokens[start:end], start, table, None)]))
            for start, end in zip(starts, ends, strict=True)
        ]
    )


def ends_of(tokens: list[int]) -> list[int]:
    """Where logits are compared: at the ends of chunks of many sizes."""
    return sorted({1, 17, len(tokens) - 1, len(tokens)} & set(range(1, len(tokens) + 1)))


def theirs(peer: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = peer(torch.tensor([tokens])).logits[0][[end - 1 for end in ends_of(tokens)]]
    return logits


def check(engine: ModelEngine, tokens: list[int], expected: Tensor) -> None:
    assert expected.abs().max() > 1, "logits of no size would agree whatever we do"
    assert (ours(engine, tokens, ends_of(tokens)) - expected).abs().max().item() < TOLERANCE


@pytest.fixture(scope="module")
def expected(model_folder: ModelFolder) -> dict[str, Tensor]:
    peer = peer_for(model_folder.manifest, model_folder.weights_path)
    return {name: theirs(peer, tokens) for name, tokens in PROMPTS.items()}


@pytest.fixture(scope="module", params=["native", *kernels()])
def engine(request: pytest.FixtureRequest, model_folder: ModelFolder) -> ModelEngine:
    """As it is served, with every kernel there is. Without a C++ compiler `native` cannot be had, and that fails."""
    plan = plan_engine(model_folder, "float32", default_cache_dir(), request.param)
    loaded = load_engine(plan, ScratchMemory(34, plan.layout.block_bytes), num_threads=2)
    assert isinstance(loaded, ModelEngine)
    return loaded


@pytest.mark.parametrize("prompt", list(PROMPTS))
def test_logits_of_the_embedded_model_are_those_of_transformers(engine, expected, prompt):
    check(engine, PROMPTS[prompt], expected[prompt])


@pytest.mark.parametrize("kernel", list(kernels()))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_logits_of_a_model_with_odd_sizes_are_those_of_transformers(tmp_path, kernel, seed):
    path = tmp_path / "model.safetensors"
    write_tiny_weights(path, TINY_MANIFEST, seed)
    tiny = engine_over(tiny_decoder(path, TINY_MANIFEST, "float32", kernel), "float32", 70, 2)
    tokens = [(31 * i * i + seed) % 131 for i in range(1100)]
    check(tiny, tokens, theirs(peer_for(TINY_MANIFEST, path), tokens))
