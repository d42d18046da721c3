"""The models of `family_models` as GGUF files, as llama.cpp's converter would write them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from family_models import BYTE_TOKENS, SPECIAL
from transformers import PreTrainedModel

Floats = npt.NDArray[np.float32]
MODEL_ARCHS = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
ARCHITECTURE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def interleave_heads(rows: Floats, num_heads: int) -> Floats:
    """What the converter does to q and k of Llamas: pairs that are half a head apart become neighbours."""
    head_dim = rows.shape[0] // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            out[head * head_dim + 2 * pair] = rows[head * head_dim + pair]
            out[head * head_dim + 2 * pair + 1] = rows[head * head_dim + head_dim // 2 + pair]
    return out


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> Floats:
    """The numbers of rope_freqs.weight: how much slower each pair turns."""
    found = []
    for pair in range(head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        long, short = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
        if wave < short:
            found.append(1.0)
        elif wave > long:
            found.append(rope["factor"])
        else:
            fits = rope["original_max_position_embeddings"] / wave
            share = (fits - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            found.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(found, np.float32)


def write_family_gguf(
    path: Path, model: PreTrainedModel, quantised: dict[str, gguf.GGMLQuantizationType] | None = None
) -> Path:
    """quantised: how to store tensors, by the end of their Hugging Face names; the others are float32"""
    config = model.config
    name = ARCHITECTURE[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_rope(writer, config.rope_parameters, head_dim)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(MODEL_ARCHS[name], config.num_hidden_layers)
    for ours, tensor in _weights(model).items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(ours.split(".")[-2])
        kept = interleave_heads(tensor, heads) if name == "llama" and heads is not None else tensor
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        kind = next((kind for end, kind in (quantised or {}).items() if ours.endswith(end)), None)
        if kind is None:
            writer.add_tensor(theirs, kept)
        else:
            writer.add_tensor(theirs, gguf.quantize(kept, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(model: PreTrainedModel) -> dict[str, Floats]:
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], head_dim: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = [*SPECIAL, *BYTE_TOKENS, "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
