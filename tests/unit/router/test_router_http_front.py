from __future__ import annotations

import pytest

from router.http_front import is_for_us, is_loopback


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.9.9.9:1",
        "localhost",
        "LocalHost:8000",
        "localhost.:8000",
        "a.localhost:8000",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:8000",
    ],
)
@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_a_server_of_this_machine_answers_to_names_of_this_machine(host: str, bound: str) -> None:
    assert is_for_us(host, bound)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "notlocalhost",
        "10.0.0.1:8000",
        "0.0.0.0",  # noqa: S104 - a name in a header
        "[::2]:8000",
        "[::1.evil.example]",
        "2130706433",
        "x@127.0.0.1",
        "127.0.0.1\xe9",
    ],
)
def test_and_to_no_other_whoever_points_it_here(host: str) -> None:
    assert not is_for_us(host, "127.0.0.1")
    assert not is_for_us(host, "localhost")


def test_a_server_that_others_can_reach_takes_any_name() -> None:
    assert is_for_us("evil.example", "0.0.0.0")  # noqa: S104 - nothing is bound
    assert is_for_us("router.internal:8000", "router.internal")
    assert is_for_us("10.0.0.1", "192.168.1.5")


def test_what_is_loopback() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("::")
    assert not is_loopback("testclient")
