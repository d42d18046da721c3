"""What the NVMe tier asks of the object that decides what to keep. It decides; the tier carries out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class EvictionOrder(Protocol):
    """Knows every block that is wholly on the disk. Called from one thread at a time.

    A block is added after its parent and removed before it.
    """

    def add(self, name: bytes, parent: bytes, position: int, now_s: float) -> None:
        """The block is there now; `position` 0 is a sequence's first, whose parent is no block."""
        ...

    def touch(self, name: bytes, now_s: float) -> None:
        """The block was used."""
        ...

    def remove(self, name: bytes) -> None:
        """The block is gone. It has no children."""
        ...

    def victims(self, num_blocks: int) -> Sequence[bytes]:
        """Up to `num_blocks` blocks, the one to go first first, children before parents. They stay until removed."""
        ...

    def forget(self, name: bytes) -> None:
        """Nothing is remembered of a block that has gone."""
        ...
