"""Ctrl-C and SIGTERM, counted: the first ends gently, the second faster, the third at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Takes both signals for the running loop, in the main thread."""

    def __init__(self, on_third: Callable[[], None]) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._on_third = on_third
        self._loop = asyncio.get_running_loop()
        self._before = {number: signal.getsignal(number) for number in SIGNALS}

    def install(self) -> None:
        """Also to be called again: other libraries take SIGTERM for themselves."""
        for number in SIGNALS:
            # add_signal_handler does nothing new for a signal that it believes to have; it has to be removed first
            self._loop.remove_signal_handler(number)
            self._loop.add_signal_handler(number, self._on_signal)

    def uninstall(self) -> None:
        """Whoever had the signals before gets them back."""
        for number, handler in self._before.items():
            self._loop.remove_signal_handler(number)
            if handler is not None:  # None: it was never Python's
                signal.signal(number, handler)

    def _on_signal(self) -> None:
        if self.second.is_set():
            self._on_third()
        elif self.first.is_set():
            self.second.set()
        else:
            self.first.set()
