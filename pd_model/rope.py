"""How a model's rotary embedding is stretched over a longer context than it was trained with.

Pair i of a head turns by position x frequency i; each kind says what becomes of the frequencies (`pd_engine.rotary`
computes them). Kinds that depend on the length of the text (dynamic, longrope) are refused: KV of a position would
change when the text grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, log
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pd_core.errors import ModelError

DEFAULT_THETA = 10000.0
DEFAULT_BETA_FAST, DEFAULT_BETA_SLOW = 32.0, 1.0


class LinearRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """Every frequency is divided by `factor`."""

    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="llama3"):
    """Waves longer than original_context_tokens / low_freq_factor are divided by `factor`, those shorter than
    original_context_tokens / high_freq_factor stay; between the two it changes smoothly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


class YarnRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="yarn"):
    """Pairs that turn fewer than beta_slow times in original_context_tokens are divided by `factor`, those that turn
    more than beta_fast times stay; between the two it changes by the pair's number.

    attention_factor: cosines and sines are multiplied by it
    truncate:         the two edges are whole pair numbers
    """

    factor: float
    original_context_tokens: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


class DividedRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="divided"):
    """Frequency i is divided by divisors[i]: what GGUF files keep of llama3's rule. One number for each pair."""

    divisors: list[float]


RopeScaling: TypeAlias = LinearRope | Llama3Rope | YarnRope | DividedRope

_POSITIVE = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_context_tokens",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)


def check_rope_scaling(scaling: RopeScaling, head_dim: int) -> None:
    """Raises ModelError for numbers that no rotary embedding can have."""
    for field in _POSITIVE:
        value = getattr(scaling, field, 1.0)
        if not (isfinite(value) and value > 0):
            raise ModelError(f"the model's rope scaling has {field} {value}; it must be above 0")
    match scaling:
        case Llama3Rope(low_freq_factor=low, high_freq_factor=high) if low >= high:
            raise ModelError(f"the model's rope scaling has low_freq_factor {low} and high_freq_factor {high}")
        case YarnRope(beta_fast=fast, beta_slow=slow) if fast < slow:
            raise ModelError(f"the model's rope scaling has beta_fast {fast} and beta_slow {slow}")
        case DividedRope(divisors=divisors):
            if len(divisors) != head_dim // 2 or not all(isfinite(value) and value > 0 for value in divisors):
                raise ModelError(
                    f"the model's rope scaling has {len(divisors)} divisors; {head_dim // 2} above 0 are needed"
                )


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What cosines and sines are multiplied by when the config does not say: as the YaRN paper has it."""

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * log(factor) + 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


def served_context(trained_tokens: int, scaling: RopeScaling | None) -> int:
    """The longest context. Whoever sets YaRN for a longer one may leave max_position_embeddings as it was trained."""
    match scaling:
        case YarnRope(factor=factor, original_context_tokens=original) if isfinite(factor):
            return max(trained_tokens, int(factor * original))
    return trained_tokens


class RopeSettings(msgspec.Struct, frozen=True):
    """What a config says of rotary embedding. scaling: None leaves the frequencies as they are."""

    theta: float
    scaling: RopeScaling | None


_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""The kinds that are served, and what each may say beside rope_theta."""
_ANY_KIND = frozenset({"rope_type", "type", "rope_theta"})


def rope_from_config(config: Mapping[str, Any], context_tokens: int, path: Path) -> RopeSettings:
    """What a Hugging Face config.json (at `path`) says. Newer ones have rope_parameters, older ones rope_scaling and
    rope_theta beside it.

    context_tokens: max_position_embeddings
    Raises ModelError naming the setting for a kind that is not served, or numbers that are missing or wrong.
    """
    return _ConfigRope(config, context_tokens, path).read()


class _ConfigRope:
    def __init__(self, config: Mapping[str, Any], context_tokens: int, path: Path) -> None:
        self._config = config
        self._context_tokens = context_tokens
        self._path = path
        self._key, self._rope = self._find()

    def read(self) -> RopeSettings:
        kind = self._rope.get("rope_type", self._rope.get("type", "default"))
        if not isinstance(kind, str) or kind not in _KEYS:
            raise self._refusal(f"{kind!r}; kinds of rope that are served: {', '.join(_KEYS)}")
        if self._rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise self._refusal(f"partial_rotary_factor {self._rope['partial_rotary_factor']}, which is not served")
        if unknown := self._rope.keys() - _KEYS[kind] - _ANY_KIND - {"partial_rotary_factor"}:
            raise self._refusal(f"{', '.join(sorted(unknown))}, which rope of kind {kind!r} is not known to have")
        outer = self._config.get("rope_theta")
        theta = self._number("rope_theta", DEFAULT_THETA if outer is None else outer)
        return RopeSettings(theta, self._scaling(kind))

    def _find(self) -> tuple[str, Mapping[str, Any]]:
        found: dict[str, Any] = {
            key: self._config[key] for key in ("rope_scaling", "rope_parameters") if self._config.get(key)
        }
        for key, rope in found.items():
            if not isinstance(rope, dict):
                raise ModelError(f"{self._path} has {key} {rope!r}, which is no set of settings")
        if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
            raise ModelError(f"{self._path} has rope_scaling and rope_parameters, which say different things: {found}")
        return next(iter(found.items()), ("rope_parameters", {}))

    def _scaling(self, kind: str) -> RopeScaling | None:
        match kind:
            case "linear":
                return LinearRope(self._number("factor"))
            case "llama3":
                return Llama3Rope(
                    factor=self._number("factor"),
                    low_freq_factor=self._number("low_freq_factor"),
                    high_freq_factor=self._number("high_freq_factor"),
                    original_context_tokens=self._original_context(),
                )
            case "yarn":
                return self._yarn()
        return None

    def _yarn(self) -> YarnRope:
        original = self._original_context()
        factor = self._number("factor", self._context_tokens / original)
        mscale = [self._number(key, 0.0) or None for key in ("mscale", "mscale_all_dim")]
        truncate = self._rope.get("truncate", True)
        if not isinstance(truncate, bool):
            raise self._refusal(f"truncate {truncate!r}; true or false is needed")
        return YarnRope(
            factor=factor,
            original_context_tokens=original,
            attention_factor=self._number("attention_factor", yarn_attention_factor(factor, *mscale)),
            beta_fast=self._number("beta_fast", DEFAULT_BETA_FAST),
            beta_slow=self._number("beta_slow", DEFAULT_BETA_SLOW),
            truncate=truncate,
        )

    def _original_context(self) -> int:
        # where a config says it twice, transformers takes the outer one
        outer = self._config.get("original_max_position_embeddings")
        original = outer if outer is not None else self._rope.get("original_max_position_embeddings")
        original = self._context_tokens if original is None else original
        if not isinstance(original, int) or isinstance(original, bool) or original < 1:
            raise self._refusal(f"original_max_position_embeddings {original!r}; a number of tokens is needed")
        return original

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._rope.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._refusal(f"{key} {value!r}; a number is needed")
        return float(value)

    def _refusal(self, what: str) -> ModelError:
        return ModelError(f"{self._path} has {self._key} with {what}")
