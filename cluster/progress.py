"""Shows how a start goes on: a bar on a terminal, plain lines elsewhere. Writes to standard error alone."""

from __future__ import annotations

import asyncio
import time
from typing import TextIO

from tqdm import tqdm

QUIET_S = 2.0
"""Not on a terminal, the same step is not reported again within this time ..."""
STILL_S = 5.0
"""... and a step that says nothing is mentioned again after this."""
REFRESH_S = 0.5


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread that outlives the bar


class Progress:
    """Steps are told apart by what their sentence says before a colon: "converting the model: 40%" is one step."""

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._began_s = time.monotonic()
        self._steps: set[str] = set()
        self._last = ""
        self._written_s = self._began_s
        self._bar: _Bar | None = None
        if stream.isatty():
            layout = "kvrelay {bar:16} {elapsed} {desc}"
            self._bar = _Bar(total=num_steps, file=stream, bar_format=layout, leave=False)

    def __call__(self, sentence: str) -> None:
        """May be called from any thread."""
        step = sentence.partition(":")[0]
        is_new = step not in self._steps
        self._steps.add(step)
        self._last = sentence
        if self._bar is not None:
            self._bar.n = min(len(self._steps) - 1, self._num_steps)
            self._bar.set_description_str(sentence)
        elif is_new or time.monotonic() - self._written_s >= QUIET_S:
            self._write(sentence)

    async def keep_alive(self) -> None:
        """Shows that time goes by while a step takes long; runs until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            if self._bar is not None:
                self._bar.refresh()
            elif time.monotonic() - self._written_s >= STILL_S:
                self._write(f"still {self._last}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _write(self, sentence: str) -> None:
        self._written_s = time.monotonic()
        self._stream.write(f"kvrelay [{self._written_s - self._began_s:5.1f} s] {sentence}\n")
        self._stream.flush()
