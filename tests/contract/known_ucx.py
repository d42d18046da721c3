"""What UCX can do here is known beforehand: its probe, which has tests of its own, takes seconds at every start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from kv_transport.ucx_offer import UcxOffer
from pd_core.config import TransferConfig


@contextlib.contextmanager
def known_ucx() -> Iterator[None]:
    """Workers that are built inside take UCX where the config allows it alone, and never else."""
    with mock.patch("kv_transport.paths.examine_ucx", _offer):
        yield


def _offer(transfer: TransferConfig, **_: object) -> UcxOffer:
    return UcxOffer(transfer.path == "ucx", "the tests know")
