"""Whether a task has failed that the router cannot do without."""

from __future__ import annotations

import asyncio

from pd_core.errors import KvrelayError


class Faults:
    """Remembers the first such failure. There is no way back: who owns the process must start it again."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """A sentence for /ready; None while all is well."""
        self._first: BaseException | None = None
        self._came = asyncio.Event()

    def report(self, error: BaseException) -> None:
        """A task ended with this error, and what it did is not done any more."""
        if self._first is None:
            self._first = error
            self.reason = f"a background task of the router failed: {type(error).__name__}: {error}"
            self._came.set()

    async def wait(self) -> KvrelayError:
        """Returns when there has been one: what is to be said of it."""
        await self._came.wait()
        error = KvrelayError(self.reason or "")
        error.__cause__ = self._first
        return error
