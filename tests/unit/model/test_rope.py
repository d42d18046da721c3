"""What a config says of rotary embedding, and what is refused of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tiny_models import MANIFEST

from pd_core.errors import ModelError
from pd_model.manifest import check_manifest, settings_digest
from pd_model.rope import (
    DividedRope,
    LinearRope,
    Llama3Rope,
    RopeScaling,
    YarnRope,
    rope_from_config,
    served_context,
)

PATH = Path("folder/config.json")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PLAIN_YARN = YarnRope(4.0, 32768, 0.1 * math.log(4) + 1, 32.0, 1.0, True)


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}, 1e6, None),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}, 1e6, LinearRope(2.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, Llama3Rope(8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": YARN}, 1e4, PLAIN_YARN),
        ({"rope_scaling": {**YARN, "attention_factor": 0.9}}, 1e4, replace(PLAIN_YARN, attention_factor=0.9)),
        ({"rope_scaling": {**YARN, "truncate": False}}, 1e4, replace(PLAIN_YARN, truncate=False)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1e4, replace(PLAIN_YARN, original_context_tokens=65536)),
        ({"rope_scaling": {**YARN, "factor": None}}, 1e4, replace(PLAIN_YARN, factor=2.0, attention_factor=None)),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            1e4,
            replace(PLAIN_YARN, original_context_tokens=4096),
        ),
        (
            {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            1e4,
            replace(PLAIN_YARN, attention_factor=1.0),
        ),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 1.0}}, 1e4, PLAIN_YARN),
    ],
)
def test_what_is_served(config: dict[str, Any], theta: float, scaling: RopeScaling | None) -> None:
    found = rope_from_config(config, 65536, PATH)
    if isinstance(scaling, YarnRope) and scaling.attention_factor is None:
        scaling = replace(scaling, attention_factor=0.1 * math.log(scaling.factor) + 1)
    assert (found.theta, found.scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling with 'dynamic'; kinds"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling with 'longrope'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters with"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention, which rope of kind"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast, which rope of kind 'linear'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor None; a number"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor '2'"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8.5}}, "original_max_position_embeddings 8.5"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate 1"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": ["yarn"]}, "no set of settings"),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "say different things"),
        ({"rope_theta": [1e4]}, "rope_theta \\[10000.0\\]; a number"),
    ],
)
def test_what_is_refused_is_named_with_its_file(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as refused:
        rope_from_config(config, 65536, PATH)
    assert str(PATH) in refused.value.message


@pytest.mark.parametrize(
    "scaling",
    [
        LinearRope(0.0),
        LinearRope(math.inf),
        Llama3Rope(8.0, 4.0, 4.0, 8192),
        Llama3Rope(8.0, 1.0, 4.0, 0),
        replace(PLAIN_YARN, beta_slow=33.0),
        replace(PLAIN_YARN, attention_factor=math.nan),
        DividedRope([1.0] * 7),
        DividedRope([1.0] * 7 + [0.0]),
    ],
)
def test_numbers_that_no_rope_can_have_are_refused(scaling: RopeScaling) -> None:
    with pytest.raises(ModelError, match="rope scaling"):
        check_manifest(replace(MANIFEST, rope_scaling=scaling))


def test_a_theta_of_zero_is_wrong_and_not_left_out() -> None:
    theta = rope_from_config({"rope_theta": 0}, 65536, PATH).theta
    with pytest.raises(ModelError, match=r"rope_theta 0\.0 must be above 0"):
        check_manifest(replace(MANIFEST, rope_theta=theta))


def test_every_scaling_has_a_settings_digest_of_its_own() -> None:
    scalings: list[RopeScaling | None] = [
        None,
        LinearRope(4.0),
        LinearRope(8.0),
        Llama3Rope(8.0, 1.0, 4.0, 8192),
        PLAIN_YARN,
        *(replace(PLAIN_YARN, **{field: 2}) for field in ("factor", "original_context_tokens", "attention_factor")),
        *(replace(PLAIN_YARN, **{field: 2}) for field in ("beta_fast", "beta_slow")),
        replace(PLAIN_YARN, truncate=False),
        DividedRope([1.0] * 8),
        DividedRope([1.0] * 7 + [2.0]),
    ]
    assert len({settings_digest(replace(MANIFEST, rope_scaling=scaling)) for scaling in scalings}) == len(scalings)


def test_yarn_lengthens_the_context_unless_the_config_has_done_so_already() -> None:
    assert served_context(32768, PLAIN_YARN) == 131072
    assert served_context(131072, PLAIN_YARN) == 131072
    assert served_context(2048, LinearRope(4.0)) == 2048
    assert served_context(2048, None) == 2048
