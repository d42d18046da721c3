"""Fixtures of the tests of calls between processes (test_rpc_*)."""

from __future__ import annotations

import socket

import pytest
from rpc_peers import Handlers, no_leaks


@pytest.fixture
async def peers():
    async with no_leaks() as peers:
        yield peers


@pytest.fixture
def handlers():
    return Handlers()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock
