"""mooncake: a peer's transfer engine, used as its users do for KV: memory registered once, one batch for all blocks.

Its TCP transport, which is what it has without RDMA. A transfer is over when the source's call returns: the target is
told nothing, so the moment of arrival is the source's.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import msgspec

from load_tests.bare_memcpy import address_of
from load_tests.transfer_halves import HOST, Pool
from load_tests.transfer_messages import Sent
from pd_core.errors import TransferError


class _Offer(msgspec.Struct, frozen=True):
    """session: the target's engine; addresses: of its blocks"""

    session: str
    addresses: list[int]


class _Engine:
    """An engine that knows the pool. Raises ImportError without mooncake or a library that it needs, TransferError."""

    def __init__(self, pool: Pool) -> None:
        self.engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise TransferError("mooncake's engine could not be made ready for tcp")
        self.addresses = [address_of(block) for block in pool.blocks]
        self.block_bytes = pool.shape.block_bytes
        if self.engine.register_memory(self.addresses[0], pool.shape.num_bytes):
            raise TransferError("mooncake's engine did not take the pool's memory")

    @property
    def session(self) -> str:
        return f"{HOST}:{self.engine.get_rpc_port()}"

    def close(self) -> None:
        self.engine.unregister_memory(self.addresses[0])


class MooncakeSource:
    """SourceHalf."""

    def __init__(self, pool: Pool) -> None:
        self._ours = _Engine(pool)
        self._told = _Offer("", [])

    async def connect(self, offer: str) -> None:
        self._told = msgspec.json.decode(offer, type=_Offer)

    async def send(self, note: str) -> Sent:
        ours, told = self._ours, self._told
        sizes = [ours.block_bytes] * len(ours.addresses)
        began_s = time.monotonic()
        failed = ours.engine.batch_transfer_sync_write(told.session, ours.addresses, told.addresses, sizes)
        ended_s = time.monotonic()
        if failed:
            raise TransferError(f"mooncake ended a transfer with {failed}")
        return Sent(began_s, ended_s)

    async def close(self) -> None:
        self._ours.close()


class MooncakeTarget:
    """Offerer."""

    def __init__(self, pool: Pool) -> None:
        self._ours = _Engine(pool)

    async def open(self) -> str:
        return msgspec.json.encode(_Offer(self._ours.session, self._ours.addresses)).decode()

    async def close(self) -> None:
        self._ours.close()
