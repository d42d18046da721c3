"""What a config.json may say: the families, the settings that are refused, and sliding windows. Tables; no files.

A setting that were ignored would give wrong text. So each one that changes what a model computes either has a place
in the manifest or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pd_model.manifest import DOWN, GATE, KEY, LINEARS, OUTPUT, QUERY, UP, VALUE

QKV = (QUERY, KEY, VALUE)
QKVO = (QUERY, KEY, VALUE, OUTPUT)
MLP = (GATE, UP, DOWN)


class Family(msgspec.Struct, frozen=True):
    """One model_type.

    model_class:  the only entry that `architectures` may have
    biased:       linears that always have a bias
    biased_by:    settings that give a bias to linears when they are true
    head_dim:     when the config names none; None is hidden_size / num_attention_heads
    slides:       whether sliding_window counts where use_sliding_window is not set
    """

    model_class: str
    qk_norm: bool
    biased: tuple[str, ...]
    biased_by: dict[str, tuple[str, ...]]
    head_dim: int | None
    slides: bool


FAMILIES: dict[str, Family] = {
    # model_type       model_class           qk_norm biased  biased_by                              head_dim slides
    "llama": Family("LlamaForCausalLM", False, (), {"attention_bias": QKVO, "mlp_bias": MLP}, None, True),
    "mistral": Family("MistralForCausalLM", False, (), {}, None, True),
    "qwen2": Family("Qwen2ForCausalLM", False, QKV, {}, None, False),
    "qwen3": Family("Qwen3ForCausalLM", True, (), {"attention_bias": QKVO}, 128, False),
}


class Rule(msgspec.Struct, frozen=True):
    """served: the values that are; absent counts as the first. why: what the others would need"""

    served: tuple[Any, ...]
    why: str


RULES: dict[str, Rule] = {
    # setting                        served            why others are not
    "hidden_act": Rule(("silu",), "the decoder computes SiLU alone"),
    "partial_rotary_factor": Rule((None, 1), "the decoder rotates whole heads"),
    "num_local_experts": Rule((None, 0), "mixtures of experts are not served"),
    "num_experts": Rule((None, 0), "mixtures of experts are not served"),
    "n_routed_experts": Rule((None, 0), "mixtures of experts are not served"),
    "quantization_config": Rule((None,), "quantised safetensors are not read; a GGUF file of the model would be"),
    "attention_bias": Rule((None, False), "this family has no such biases"),
    "mlp_bias": Rule((None, False), "this family has no such biases"),
}
"""A family's own `biased_by` settings are exempt."""


def find_family(config: Mapping[str, Any]) -> Family | str:
    """The config's family, or the sentence (without its subject) that refuses it."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        return f"model_type {model_type!r}; families that are served: {', '.join(FAMILIES)}"
    if classes not in (None, [], [family.model_class]):
        return f"architectures {classes}; of model_type {model_type!r} only {family.model_class} is served"
    return family


def find_refusal(config: Mapping[str, Any], family: Family, context_tokens: int) -> str | None:
    """None, or the sentence (without its subject) that refuses a setting by its name and value."""
    for setting, rule in RULES.items():
        value = config.get(setting, rule.served[0])
        if value not in rule.served and setting not in family.biased_by:
            return f"{setting} {value!r}: {rule.why}"
    return find_window(config, family, context_tokens)


def find_biases(config: Mapping[str, Any], family: Family) -> list[str]:
    """The linears that have a bias, in LINEARS' order."""
    by_setting = [name for setting, names in family.biased_by.items() if config.get(setting) for name in names]
    return [name for name in LINEARS if name in (*family.biased, *by_setting)]


def find_window(config: Mapping[str, Any], family: Family, context_tokens: int) -> str | None:
    """The refusal of a sliding window that is in use: keys further back than it would have to be masked.

    | a layer of layer_types  | use_sliding_window | sliding_window | verdict |
    | is neither full nor sliding | any            | any            | refused |
    | is "sliding_attention"  | any                | none           | refused |
    | any                     | any                | none           | served  |
    | any                     | any                | >= context     | served  |
    | is "sliding_attention"  | any                | < context      | refused |
    | none                    | false              | < context      | served  |
    | none                    | true               | < context      | refused |

    Without use_sliding_window the family's `slides` stands for it.
    """
    layers, window = config.get("layer_types") or [], config.get("sliding_window")
    strange = [kind for kind in layers if kind not in ("full_attention", "sliding_attention")]
    has_sliding_layer = "sliding_attention" in layers
    uses = config.get("use_sliding_window")
    slides = has_sliding_layer or (family.slides if uses is None else bool(uses))
    if strange:
        return f"layer_types with {strange[0]!r}; only full attention is served"
    if window is None:
        return "layer_types with 'sliding_attention', which is not served" if has_sliding_layer else None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        return f"sliding_window {window!r}; a number of tokens is needed"
    if window >= context_tokens or not slides:
        return None
    told = "layer_types with 'sliding_attention' and " if has_sliding_layer else ""
    used = f"use_sliding_window {str(uses).lower()} and " if uses is not None else ""
    return f"{told}{used}sliding_window {window} in a context of {context_tokens}; only full attention is served"
