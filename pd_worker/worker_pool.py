"""A worker's KV pool and what its transports see of it: the pool itself, or a ring of host memory beside a device."""

from __future__ import annotations

from collections.abc import Callable

from kv_transport.landing import DirectLanding, Landing
from pd_core.errors import EngineError
from pd_worker.device_ring import DeviceRing
from pd_worker.memory import PoolMemory
from pd_worker.outgoing_blocks import DirectBlocks, OutgoingBlocks
from pd_worker.ring_blocks import RingBlocks
from pd_worker.ring_landing import RingLanding


class WorkerPool:
    """memory: what transports read and write

    ring: how its blocks become the pool's, and the pool's get there; None: the memory is the pool
    """

    def __init__(self, memory: PoolMemory, ring: DeviceRing | None) -> None:
        self.memory = memory
        self.landing: Landing = DirectLanding(memory) if ring is None else RingLanding(ring)
        self.blocks: OutgoingBlocks = DirectBlocks(memory) if ring is None else RingBlocks(ring)
        self._ring = ring

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.memory.block_bytes

    def start(self, on_failure: Callable[[EngineError], None]) -> None:
        """Before the first transfer. `on_failure` is called, by any thread, when a device can copy no more blocks."""
        if self._ring is not None:
            self._ring.start(on_failure)

    def close(self) -> None:
        """When engine and transports are closed. May be called twice. Raises EngineError when a copy does not end."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
        self.memory.close()
