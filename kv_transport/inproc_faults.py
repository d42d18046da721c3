"""What goes wrong with a frame on the path "inproc". Drawn from a random generator that the test gives, so that a seed
tells the whole story. Pure.
"""

from __future__ import annotations

import random

import msgspec


class FrameFaults(msgspec.Struct, frozen=True):
    """What happens to one frame of `num_blocks` blocks.

    delay_s:       the writer pauses for so long before the frame
    stall_s:       and for so long in the middle of a block
    flipped_bit:   this bit of the frame's KV bytes arrives inverted
    is_duplicated: the frame arrives a second time, later
    is_late:       the frame arrives later than what is sent after it
    cut_at:        the connection breaks after this part of the frame's bytes, and the sender notices
    truncated_at:  the same, and the sender does not notice
    """

    delay_s: float = 0.0
    stall_s: float = 0.0
    flipped_bit: int | None = None
    is_duplicated: bool = False
    is_late: bool = False
    cut_at: float | None = None
    truncated_at: float | None = None


class FaultPlan:
    """How often each fault happens to a frame: probabilities from 0 to 1, drawn independently.

    generator: seeded by the test
    delay_s:   longest pause before a delayed frame; also how late late and duplicated frames are
    stall_s:   pause in the middle of a stalled frame
    """

    def __init__(
        self,
        generator: random.Random,
        *,
        delay: float = 0.0,
        stall: float = 0.0,
        cut: float = 0.0,
        corrupt: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        truncate: float = 0.0,
        delay_s: float = 0.01,
        stall_s: float = 0.01,
    ) -> None:
        self._generator = generator
        self._delay = delay
        self._stall = stall
        self._cut = cut
        self._corrupt = corrupt
        self._duplicate = duplicate
        self._reorder = reorder
        self._truncate = truncate
        self._stall_s = stall_s
        self.delay_s = delay_s

    def draw(self, num_bytes: int) -> FrameFaults:
        """The fate of the next frame, which carries `num_bytes` KV bytes. Always draws the same number of times."""
        draw = self._generator.random
        delay, stall, cut, corrupt, duplicate, reorder, truncate = (draw() for _ in range(7))
        size, place, end = draw(), draw(), draw()
        return FrameFaults(
            delay_s=self.delay_s * size if delay < self._delay else 0.0,
            stall_s=self._stall_s if stall < self._stall else 0.0,
            flipped_bit=int(place * num_bytes * 8) if corrupt < self._corrupt else None,
            is_duplicated=duplicate < self._duplicate,
            is_late=reorder < self._reorder,
            cut_at=end if cut < self._cut else None,
            truncated_at=end if truncate < self._truncate else None,
        )


NO_FAULTS = FrameFaults()
