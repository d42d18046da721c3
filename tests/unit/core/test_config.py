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
        ({"transfer": {"tcp_connections": 0}}, "transfer.tcp_connections"),
        ({"transfer": {"host": "0.0.0.0"}}, "transfer.host"),  # noqa: S104 - refused: nobody can be told it
        ({"transfer": {"host": "::"}}, "transfer.host"),
        ({"transfer": {"host": "0:0:0:0:0:0:0:0"}}, "transfer.host"),
        ({"transfer": {"host": "fe80::1%eth0"}}, "transfer.host"),
        ({"tls": {"certificate": "/a", "key": "b", "authority": "/c"}}, "tls.key"),
        ({"heartbeat": {"suspect_s": 5.0, "dead_s": 4.0}}, "heartbeat.dead_s"),
        ({"heartbeat": {"interval_s": 3.0}}, "heartbeat.suspect_s"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(tree: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1", "fd00::1", "node-7.cluster.test"])
def test_an_address_or_a_name_of_one_can_be_told_to_others(host: str) -> None:
    assert parse_config({"transfer": {"host": host}}).transfer.host == host


@pytest.mark.parametrize("tree", [{"decode": {"max_bach": 4}}, {"decoder": {}}, {"model": {"fake": {"speed": 1}}}])
def test_an_unknown_field_is_refused_by_name(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_bach|decoder|speed"):
        parse_config(tree)


def test_ucx_that_cannot_be_encrypted_is_refused_together_with_tls_naming_both() -> None:
    files = {"certificate": "/a", "key": "/b", "authority": "/c"}
    with pytest.raises(ConfigError, match=r"tls is set, and transfer\.path ucx cannot be encrypted") as caught:
        parse_config({"transfer": {"path": "ucx"}, "tls": files})
    assert caught.value.param == "transfer.path"
    parse_config({"transfer": {"path": "ucx"}})
    parse_config({"tls": files})


@pytest.mark.parametrize(
    ("num_workers", "path", "tcp_connections", "param"),
    [
        (4, "tcp", 16, None),
        (5, "tcp", 16, "transfer.tcp_connections"),
        (5, "auto", 16, "transfer.tcp_connections"),
        (5, "shm", 16, None),
        (64, "auto", None, None),
        (65, "auto", None, "prefill.num_workers"),
    ],
)
def test_writers_that_one_pool_has_no_connections_for_are_refused(
    num_workers: int, path: str, tcp_connections: int | None, param: str | None
) -> None:
    tree = {"prefill": {"num_workers": num_workers}, "transfer": {"path": path, "tcp_connections": tcp_connections}}
    if param is None:
        assert parse_config(tree).prefill.num_workers == num_workers
        return
    with pytest.raises(ConfigError, match="a decode worker takes 64") as caught:
        parse_config(tree)
    assert caught.value.param == param
