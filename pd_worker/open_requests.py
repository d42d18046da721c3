"""Which requests a worker has, until they hold nothing any more."""

from __future__ import annotations

import asyncio


class OpenRequests:
    """Requests that hold anything here, until they hold nothing any more."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def enter(self, request_id: str) -> None:
        self._ids.add(request_id)

    def leave(self, request_id: str) -> None:
        self._ids.discard(request_id)
        self._left.set()

    async def wait_empty(self, within_s: float) -> bool:
        """Whether there is none any more, at the latest after so long."""
        try:
            async with asyncio.timeout(within_s):
                while self._ids:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return not self._ids
        return True
