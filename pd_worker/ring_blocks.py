"""Blocks that leave a pool on a device: copied into slots of its ring, where the transport reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from pd_core.errors import EngineError
from pd_worker.device_ring import DeviceRing, call_soon

COPY_S = 5.0
"""A device that has not copied a few blocks out within so long has failed."""


class RingBlocks:
    """See outgoing_blocks.OutgoingBlocks. Its methods belong to the event loop."""

    def __init__(self, ring: DeviceRing) -> None:
        self._ring = ring

    @property
    def num_blocks(self) -> int:
        return self._ring.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._ring.block_bytes

    @property
    def most_at_once(self) -> int:
        return self._ring.most_at_once

    def shown(self, block_ids: Sequence[int], within_s: float) -> AbstractAsyncContextManager[Sequence[int]]:
        return self._shown(block_ids, within_s)

    @asynccontextmanager
    async def _shown(self, block_ids: Sequence[int], within_s: float) -> AsyncIterator[Sequence[int]]:
        slots = await self._ring.borrow_soon(block_ids, within_s)
        try:
            await self._copy_out(slots)
            yield slots
        finally:
            self._ring.give_back(slots)

    async def _copy_out(self, slots: list[int]) -> None:
        """Cancelled, it returns when the device has left our blocks. Raises EngineError when it fails, or hangs."""
        loop = asyncio.get_running_loop()
        copied: asyncio.Future[EngineError | None] = loop.create_future()
        self._ring.copy_out(slots, lambda error: call_soon(loop, copied.set_result, error))
        was_cancelled = False
        ends_s = loop.time() + COPY_S
        while not copied.done() and (left_s := ends_s - loop.time()) > 0:
            try:
                await asyncio.wait([copied], timeout=left_s)
            except asyncio.CancelledError:
                was_cancelled = True
        if copied.done():
            error = copied.result()
        else:
            error = EngineError(f"no copy from the device within {COPY_S:g} s")
            self._ring.fail(error)
        if was_cancelled:
            raise asyncio.CancelledError
        if error is not None:
            raise error
