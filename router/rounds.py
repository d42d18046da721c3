"""What tokens bring about, done once for all that the loop reads in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Rounds:
    """A decode worker's step brings a token for each of its streams, in one piece: one callback serves their readers,
    where each would else have a task woken. And of several tokens for one client it makes one write."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def soon(self, callback: Callable[[], None]) -> None:
        """Has it called when the loop comes round. It must not raise."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(callback)

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()
