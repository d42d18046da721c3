"""Two-layer Llamas small enough to write in a test: as a GGUF file and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pd_model.gguf_source import gguf_tensor_name
from pd_model.manifest import ModelManifest, tensor_shapes

Weights = dict[str, npt.NDArray[np.float32]]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTE_TOKENS, "he"]
MERGES = ["h e"]
CHAT_TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"

MANIFEST = ModelManifest(
    architecture="llama",
    num_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=len(TOKENS),
    context_tokens=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tied_embeddings=True,
    eos_token_ids=[2],
    bos_token_id=1,
)


def make_weights(manifest: ModelManifest = MANIFEST) -> Weights:
    draw = np.random.default_rng(7)
    return {name: draw.standard_normal(shape, np.float32) for name, shape in tensor_shapes(manifest).items()}


def interleave_heads(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to q and k: pairs that are half a head apart become neighbours."""
    head_dim = rows.shape[0] // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            out[head * head_dim + 2 * pair] = rows[head * head_dim + pair]
            out[head * head_dim + 2 * pair + 1] = rows[head * head_dim + head_dim // 2 + pair]
    return out


def as_gguf_keeps_it(name: str, tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if name.endswith("q_proj.weight"):
        return interleave_heads(tensor, MANIFEST.num_heads)
    if name.endswith("k_proj.weight"):
        return interleave_heads(tensor, MANIFEST.num_kv_heads)
    return tensor


def write_gguf(
    path: Path,
    weights: Weights,
    quantised: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, Any] | None = None,
    pre: str = "smollm",
    architecture: str = "llama",
) -> Path:
    """`quantised`: how to store a tensor, by its Hugging Face name; the others are float32. `extra`: more settings."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(MANIFEST.num_layers)
    writer.add_context_length(MANIFEST.context_tokens)
    writer.add_embedding_length(MANIFEST.hidden_size)
    writer.add_feed_forward_length(MANIFEST.intermediate_size)
    writer.add_head_count(MANIFEST.num_heads)
    writer.add_head_count_kv(MANIFEST.num_kv_heads)
    writer.add_rope_freq_base(MANIFEST.rope_theta)
    writer.add_layer_norm_rms_eps(MANIFEST.rms_norm_eps)
    writer.add_rope_dimension_count(MANIFEST.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in weights.items():
        kept = as_gguf_keeps_it(name, tensor)
        kind = (quantised or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_tensor_name(name), kept)
        else:
            writer.add_tensor(gguf_tensor_name(name), gguf.quantize(kept, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "num_hidden_layers": MANIFEST.num_layers,
    "hidden_size": MANIFEST.hidden_size,
    "intermediate_size": MANIFEST.intermediate_size,
    "num_attention_heads": MANIFEST.num_heads,
    "num_key_value_heads": MANIFEST.num_kv_heads,
    "vocab_size": MANIFEST.vocab_size,
    "max_position_embeddings": MANIFEST.context_tokens,
    "rms_norm_eps": MANIFEST.rms_norm_eps,
    "rope_theta": MANIFEST.rope_theta,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def tiny_tokenizer() -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write_hf_folder(folder: Path, weights: Weights, **changed_settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | changed_settings))
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|im_end|>"}})
    )
    save_file(weights, folder / "model.safetensors")
    return folder
