"""A tiny random model of each family, made and written by transformers' own classes: what ours are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = len(SPECIAL) + len(BYTE_TOKENS) + 1
CONTEXT_TOKENS = 640

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 160,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 160}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """One model to make. settings: of the config, beside the sizes"""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "llama tied": Case("llama", {"tie_word_embeddings": True}),
    "llama with biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with explicit head_dim": Case("llama", {"head_dim": 48}),
    "llama linear rope": Case("llama", {"rope_parameters": LINEAR}),
    "llama llama3 rope": Case("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": Case("llama", {"rope_parameters": YARN}),
    "llama yarn with all it may say": Case(
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "attention_factor": 1.3,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
    ),
    "llama yarn with mscale": Case("llama", {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral with a window as wide as its context": Case("mistral", {"sliding_window": CONTEXT_TOKENS}),
    "qwen2": Case("qwen2"),
    "qwen2 tied yarn": Case("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2 with a window that is off": Case("qwen2", {"use_sliding_window": False, "sliding_window": 32}),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "qwen3 tied with biases": Case("qwen3", {"head_dim": 48, "attention_bias": True, "tie_word_embeddings": True}),
}


def make_model(case: Case, seed: int = 1) -> PreTrainedModel:
    """A model of three layers whose every tensor is random: norms and biases too, and attention that is not flat."""
    config_class, model_class = FAMILIES[case.family]
    config = config_class(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-5,
            "rope_parameters": dict(DEFAULT),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_implementation": "eager",
            "dtype": torch.float32,
            **case.settings,
        }
    )
    model = model_class(config).eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=source)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * drawn)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * drawn)
            else:
                parameter.copy_(drawn * (1.0 if "embed" in name else 1.5) / parameter.shape[1] ** 0.5)
    return model  # type: ignore[no-any-return]


def byte_tokenizer() -> Tokenizer:
    tokens = [*SPECIAL, *BYTE_TOKENS, "he"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write_folder(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return folder


def prompt(num_tokens: int, seed: int = 1) -> list[int]:
    drawn = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


def their_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Of every position: [tokens, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
