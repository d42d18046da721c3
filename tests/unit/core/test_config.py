"""A wrong setting is refused by its path, never dropped."""

from __future__ import annotations

from typing import Any

import pytest

from pd_core.config import Config, check_config, parse_config
from pd_core.errors import ConfigError


def test_an_empty_tree_gives_the_defaults_and_the_defaults_are_right() -> None:
    assert parse_config({}) == Config()
    check_config(Config())


@pytest.mark.parametrize(
    ("tree", "param"),
    [
        ({"decode": {"max_batch": "many"}}, "decode.max_batch"),
        ({"decode": {"max_batch": 0}}, "decode.max_batch"),
        ({"decode": {"num_blocks": 0}}, "decode.num_blocks"),
        ({"prefill": {"chunk_tokens": 100}}, "prefill.chunk_tokens"),
        ({"prefill": {"chunk_tokens": 8}}, "prefill.chunk_tokens"),
        ({"router": {"port": 65536}}, "router.port"),
        ({"router": {"port": -1}}, "router.port"),
        ({"router": {"queue_timeout_s": float("nan")}}, "router.queue_timeout_s"),
        ({"model": {"dtype": "int4"}}, "model.dtype"),
        ({"model": {"fake": {"step_s": -1}}}, "model.fake.step_s"),
        ({"transfer": {"lease_s": 0}}, "transfer.lease_s"),
        ({"heartbeat": {"suspect_s": 5.0, "dead_s": 4.0}}, "heartbeat.dead_s"),
        ({"heartbeat": {"interval_s": 3.0}}, "heartbeat.suspect_s"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(tree: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("tree", [{"decode": {"max_bach": 4}}, {"decoder": {}}, {"model": {"fake": {"speed": 1}}}])
def test_an_unknown_field_is_refused_by_name(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_bach|decoder|speed"):
        parse_config(tree)
