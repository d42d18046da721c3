"""Hosts for the tests of this folder, which are skipped with the reason where there can be none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_network import HostNetwork, host_network, why_no_hosts

sys.path.append(str(Path(__file__).parents[1] / "contract"))  # worker_rig.py: the router of thirty lines is the same


@pytest.fixture
def network(tmp_path: Path) -> Iterator[HostNetwork]:
    """Four hosts: two of each may have workers, a router, and one to spare."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    with host_network("prefill", "decode", "router", "spare", kept=[tmp_path]) as made:
        yield made
