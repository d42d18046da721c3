"""What a worker asks of an engine. Implemented in pd_engine; synchronous, one caller at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pd_core.layout import Fingerprint
from pd_core.request import SamplingParams


class SequenceStep(msgspec.Struct, frozen=True):
    """One sequence's share of an engine step.

    tokens:    ids to run through the model, at positions start, start + 1, ...
    start:     position of tokens[0]; KV of all earlier positions is in the blocks already
    block_ids: the sequence's block table, covering positions 0 .. start + len(tokens) - 1 at least
    sample:    how to draw the token after the last one; None in the middle of a prompt
    """

    tokens: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: SamplingParams | None

    @property
    def end(self) -> int:
        """Position after the last token of the step: the position of the token that is drawn."""
        return self.start + len(self.tokens)


class Engine(Protocol):
    """Runs sequences over the KV pool it was made with.

    A block is zeroed by the engine when a sequence first writes into it (position % 16 == 0), so no byte of an
    earlier request is ever read. A sequence's result depends on its own tokens, sampling and KV alone: not on the
    other sequences of the step, nor on how its tokens were cut into steps.
    """

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Most positions a sequence may have."""
        ...

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        """Runs all sequences once; one drawn token for each (None where `sample` is None).

        `is_cancelled` is asked between layers; when it says yes, Cancelled is raised, no token has been drawn and
        the KV of the step's own positions is undefined (running the same step again makes it right).
        When it returns or raises, nothing reads or writes the step's blocks any more, wherever the pool lies.
        Raises EngineError for ids outside the vocabulary or block tables that do not cover the step.
        """
        ...

    def invariance_report(self) -> dict[str, str]:
        """What the engine proved about itself at start, for `/ready`'s detail (numerics id, "bit-exact" or why not)."""
        ...
