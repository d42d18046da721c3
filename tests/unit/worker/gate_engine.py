"""An engine that stays inside a step until a test lets it go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, EngineError
from pd_core.layout import Fingerprint
from pd_engine.fake import FAKE_LAYOUT

HANG_S = 5.0
POLL_S = 0.001


class GateEngine:
    """Answers every step with `token` for each sequence, or raises `failure`; waits for `gate` first.

    is_inside:       set while a step is under way
    bad_tables:      block tables whose sequences fail the steps that they are in
    is_mute:         answers steps with no token at all, which no engine may
    hears_cancelled: whether it leaves a step that is cancelled; one that does not goes on until the gate opens
    """

    def __init__(self, token: int = 7) -> None:
        self.token = token
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.is_inside = threading.Event()
        self.bad_tables: list[list[int]] = []
        self.is_mute = False
        self.hears_cancelled = True
        self.was_cancelled = False
        self.steps: list[list[SequenceStep]] = []

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint("gate", "gate", "gate", "gate", FAKE_LAYOUT)

    @property
    def vocab_size(self) -> int:
        return 97

    @property
    def context_tokens(self) -> int:
        return 512

    async def until_inside(self) -> None:
        """Returns when a step is under way."""
        async with asyncio.timeout(HANG_S):
            while not self.is_inside.is_set():
                await asyncio.sleep(POLL_S)

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        self.steps.append(list(steps))
        self.is_inside.set()
        try:
            waits = int(HANG_S / POLL_S)
            while not self.gate.wait(POLL_S):
                waits -= 1
                assert waits, "the test never opened the gate"
                if is_cancelled():
                    self.was_cancelled = True
                    if self.hears_cancelled:
                        raise Cancelled("stopped inside a step")
            if self.failure is not None:
                raise self.failure
            if any(list(step.block_ids) in self.bad_tables for step in steps):
                raise EngineError("a bad row")
            if self.is_mute:
                return []
            return [None if step.sample is None else self.token for step in steps]
        finally:
            self.is_inside.clear()

    def invariance_report(self) -> dict[str, str]:
        return {}
