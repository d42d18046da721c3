"""nixl: a peer's library, used as its users do for KV: memory registered once, one WRITE for all blocks of a transfer.

Its UCX backend, as its defaults have it. The target looks for the notification that comes with the last byte; both
sides poll, as its own benchmarks do. The request is made within the measured time, for its blocks are others each time.
"""

from __future__ import annotations

import base64
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from load_tests.bare_memcpy import address_of
from load_tests.transfer_halves import PUSH_S, Pool
from load_tests.transfer_messages import Sent
from pd_core.errors import DeadlineExceeded, TransferError

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
HOST_MEMORY = "DRAM"
ARRIVED = b"all"


class _Offer(msgspec.Struct, frozen=True):
    """metadata: of the target's agent, in base64; addresses: of its blocks"""

    metadata: str
    addresses: list[int]


class _Agent:
    """An agent that knows the pool. Raises ImportError without nixl, or what it raises when it cannot start."""

    def __init__(self, name: str, pool: Pool) -> None:
        api = _load()
        self.block_bytes = pool.shape.block_bytes
        self.addresses = [address_of(block) for block in pool.blocks]
        self.agent = api.nixl_agent(f"{name}-{pool.shape.name}", api.nixl_agent_config(enable_prog_thread=False))
        whole = [(self.addresses[0], pool.shape.num_bytes, 0, "")]
        self._registered = self.agent.register_memory(whole, HOST_MEMORY)

    def descriptors(self, addresses: Sequence[int]) -> Any:
        return self.agent.get_xfer_descs([(address, self.block_bytes, 0) for address in addresses], HOST_MEMORY)

    def close(self) -> None:
        self.agent.deregister_memory(self._registered)


class NixlSource:
    """SourceHalf."""

    def __init__(self, pool: Pool) -> None:
        self._ours = _Agent("source", pool)
        self._peer = ""
        self._remote: list[int] = []

    async def connect(self, offer: str) -> None:
        told = msgspec.json.decode(offer, type=_Offer)
        name = self._ours.agent.add_remote_agent(base64.b64decode(told.metadata))
        self._peer = name.decode() if isinstance(name, bytes) else str(name)
        self._remote = told.addresses

    async def send(self, note: str) -> Sent:
        agent = self._ours.agent
        began_s = time.monotonic()
        local, remote = self._ours.descriptors(self._ours.addresses), self._ours.descriptors(self._remote)
        transfer = agent.initialize_xfer("WRITE", local, remote, self._peer, ARRIVED)
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
            _check_deadline(began_s)
        ended_s = time.monotonic()
        agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise TransferError(f"nixl ended a transfer with {state}")
        return Sent(began_s, ended_s)

    async def close(self) -> None:
        self._ours.close()


class NixlTarget:
    """TargetHalf."""

    def __init__(self, pool: Pool) -> None:
        self._ours = _Agent("target", pool)

    async def open(self) -> str:
        metadata = base64.b64encode(self._ours.agent.get_agent_metadata()).decode()
        return msgspec.json.encode(_Offer(metadata, self._ours.addresses)).decode()

    async def receive(self, say_ready: Callable[[str], None]) -> float:
        agent = self._ours.agent
        say_ready("")
        began_s = time.monotonic()
        while not agent.get_new_notifs():
            _check_deadline(began_s)
        return time.monotonic()

    async def close(self) -> None:
        self._ours.close()


def _load() -> Any:
    """The library's module under whichever name it is installed. Raises ImportError."""
    for name in MODULES[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(MODULES[-1])


def _check_deadline(began_s: float) -> None:
    if time.monotonic() > began_s + PUSH_S:
        raise DeadlineExceeded(f"nixl did not move the blocks within {PUSH_S:g} s")
