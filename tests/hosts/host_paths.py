"""The paths that KV can take from host to host, for tests that all of them must pass."""

from __future__ import annotations

import pytest

from kv_transport.ucx_library import is_installed
from kv_transport.ucx_offer import NOT_INSTALLED

NO_UCX = pytest.mark.skipif(not is_installed(), reason=NOT_INSTALLED)
NETWORK_PATHS = ["tcp", pytest.param("ucx", marks=NO_UCX)]
over_every_network_path = pytest.mark.parametrize("path", NETWORK_PATHS)
