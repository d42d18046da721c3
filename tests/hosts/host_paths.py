"""The paths that KV can take from host to host, for tests that all of them must pass."""

from __future__ import annotations

import importlib.util

import pytest

NO_UCX = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed: pip install 'kvrelay[ucx]'"
)
NETWORK_PATHS = ["tcp", pytest.param("ucx", marks=NO_UCX)]
over_every_network_path = pytest.mark.parametrize("path", NETWORK_PATHS)
