"""Tables of the rotary embedding: cosines and sines of every position's angles, for both runners.

Frequencies are float32, as the models were trained with. Cosines are taken in float64 by numpy, because torch's depend
in the last bit on where its threads cut the table.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pd_model.manifest import ModelManifest
from pd_model.rope import DividedRope, LinearRope, Llama3Rope, YarnRope

Floats = NDArray[np.float32]


def rotary_tables(manifest: ModelManifest) -> tuple[Floats, Floats]:
    """cos and sin, float32, each [context_tokens, head_dim / 2]: column i is of the pair (i, i + head_dim / 2).

    YaRN's attention factor is in them, as in transformers: q and k both grow by it.
    """
    positions = np.arange(manifest.context_tokens, dtype=np.float32)
    angles = (positions[:, None] * frequencies(manifest)[None, :]).astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    match manifest.rope_scaling:
        case YarnRope(attention_factor=factor) if factor != 1.0:
            return cos * np.float32(factor), sin * np.float32(factor)
    return cos, sin


def frequencies(manifest: ModelManifest) -> Floats:
    """By how much each pair turns from one position to the next, float32, [head_dim / 2]."""
    half = np.arange(0, manifest.head_dim, 2, dtype=np.float32) / np.float32(manifest.head_dim)
    trained: Floats = np.float32(1.0) / np.power(np.float32(manifest.rope_theta), half)
    match manifest.rope_scaling:
        case LinearRope(factor=factor):
            trained = trained / np.float32(factor)
        case DividedRope(divisors=divisors):
            steps: Floats = np.array(divisors, np.float32)
            trained = trained / steps
        case Llama3Rope() as rope:
            trained = _llama3(rope, trained)
        case YarnRope() as rope:
            trained = _yarn(rope, trained, manifest)
    return trained


def _llama3(rope: Llama3Rope, trained: Floats) -> Floats:
    """Long waves are stretched, short ones are not; between the two by how often they fit into the first context."""
    factor = np.float32(rope.factor)
    fits = np.float32(rope.original_context_tokens) * trained / np.float32(2 * math.pi)
    share = (fits - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    share = np.clip(share, np.float32(0), np.float32(1))
    scaled: Floats = (np.float32(1) - share) * trained / factor + share * trained
    return scaled


def _yarn(rope: YarnRope, trained: Floats, manifest: ModelManifest) -> Floats:
    """Fast pairs stay, slow ones are stretched; between the two by the pair's number."""
    first, last = (_pair_that_turns(turns, rope, manifest) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, manifest.head_dim - 1)
    width = 0.001 if first == last else last - first
    number = np.arange(manifest.head_dim // 2, dtype=np.float32)
    slow = np.clip((number - np.float32(first)) / np.float32(width), np.float32(0), np.float32(1))
    scaled: Floats = trained / np.float32(rope.factor) * slow + trained * (np.float32(1) - slow)
    return scaled


def _pair_that_turns(turns: float, rope: YarnRope, manifest: ModelManifest) -> float:
    """The number of the pair that turns so often in the first context; no whole number."""
    wave = rope.original_context_tokens / (turns * 2 * math.pi)
    return manifest.head_dim * math.log(wave) / (2 * math.log(manifest.rope_theta))
