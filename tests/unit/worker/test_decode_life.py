"""The table of a sequence's life on a decode worker."""

from __future__ import annotations

import pytest

from decode_worker.life import (
    BlocksGivenUp,
    BlocksTaken,
    ChunkComputed,
    Ended,
    KvArrived,
    LifeEvent,
    Phase,
    SequenceLife,
    TokenDrawn,
    step,
)
from pd_core.errors import InvalidTransition


def life(phase: Phase, **fields: int) -> SequenceLife:
    known = {"num_prompt": 30, "num_limit": 100, "num_tokens": 40, "seniority": 0} | fields
    return SequenceLife(name="r/1", phase=phase, **known)  # type: ignore[arg-type]


EVENTS: list[LifeEvent] = [
    KvArrived(),
    BlocksTaken(3, 0.0),
    ChunkComputed(16, 0.0),
    TokenDrawn(),
    BlocksGivenUp(),
    Ended(),
]
FITS: dict[Phase, tuple[type[LifeEvent], ...]] = {
    Phase.RESERVED: (KvArrived, Ended),
    Phase.WAITING: (BlocksTaken, Ended),
    Phase.COMPUTING: (ChunkComputed, BlocksGivenUp, Ended),
    Phase.RUNNING: (BlocksTaken, TokenDrawn, BlocksGivenUp, Ended),
    Phase.OVER: (),
}
LIVES = {
    Phase.RESERVED: life(Phase.RESERVED),
    Phase.WAITING: life(Phase.WAITING),
    Phase.COMPUTING: life(Phase.COMPUTING, num_blocks=3),
    Phase.RUNNING: life(Phase.RUNNING, num_blocks=3, num_computed=39),
    Phase.OVER: life(Phase.OVER),
}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_fits_a_phase_or_is_a_fault_and_changes_nothing(phase: Phase, event: LifeEvent) -> None:
    before = LIVES[phase]
    if isinstance(event, FITS[phase]):
        after = step(before, event)
        after.validate()
        assert after != before
    else:
        with pytest.raises(InvalidTransition, match="r/1"):
            step(before, event)


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (life(Phase.WAITING), BlocksTaken(2, 0.0)),  # its tokens need three
        (life(Phase.RUNNING, num_blocks=3, num_computed=39), BlocksTaken(0, 0.0)),
        (life(Phase.COMPUTING, num_blocks=3, num_computed=16), ChunkComputed(16, 0.0)),
        (life(Phase.COMPUTING, num_blocks=3), ChunkComputed(41, 0.0)),
        (life(Phase.COMPUTING, num_blocks=3, num_computed=39), TokenDrawn()),
        (life(Phase.RUNNING, num_blocks=2, num_computed=39), TokenDrawn()),  # its KV would lie nowhere
    ],
)
def test_an_event_whose_numbers_do_not_fit_is_a_fault(before: SequenceLife, event: LifeEvent) -> None:
    with pytest.raises(InvalidTransition):
        step(before, event)


@pytest.mark.parametrize(
    "wrong",
    [
        life(Phase.WAITING, num_blocks=1),
        life(Phase.RESERVED, num_computed=1),
        life(Phase.COMPUTING, num_blocks=2),
        life(Phase.RUNNING, num_blocks=3, num_computed=38),
        life(Phase.RUNNING, num_blocks=2, num_computed=39),
        life(Phase.RUNNING, num_blocks=9, num_tokens=102, num_computed=101),
    ],
)
def test_fields_that_contradict_each_other_are_found(wrong: SequenceLife) -> None:
    with pytest.raises(InvalidTransition, match="r/1"):
        wrong.validate()
