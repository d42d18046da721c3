"""The sending half of a handoff: from a prefill worker's first finished chunk until its blocks are released.

    PUSHING -> FINISHING -- committed -----------> RELEASED
       \\   <- missing -/ \\                       /
        \\________________\\__> ABORTED -- quiet --/

Our blocks stay held until the receiver has committed or the handoff is aborted *and* no push reads them any more:
"sent" is not enough, because what was lost on the way must be sent again. Pushes may end in any order.
An event that the table does not have for a state raises InvalidTransition and changes nothing.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from pd_core.errors import InvalidTransition, KvrelayError, TransferError
from pd_core.ticket import FirstToken

MAX_ROUNDS = 3
"""How often missing blocks are sent again before the handoff is given up."""


class HandoffState(enum.Enum):
    PUSHING = "pushing"  # chunks are computed and pushed
    FINISHING = "finishing"  # everything was pushed; the receiver has been asked for its verdict
    ABORTED = "aborted"  # given up; a push may still read our blocks
    RELEASED = "released"  # nothing reads our blocks any more; they are released


class BlocksReady(msgspec.Struct, frozen=True):
    """The engine has finished the KV of these blocks of the range."""

    indices: list[int]


class PushEnded(msgspec.Struct, frozen=True):
    """A push no longer reads our blocks, whether it succeeded or broke: the verdict says what arrived."""


class PromptComputed(msgspec.Struct, frozen=True):
    """The last chunk is done and the first token is drawn; no BlocksReady comes after this."""

    first_token: FirstToken


class BlocksMissing(msgspec.Struct, frozen=True):
    """The receiver's verdict: these blocks did not arrive, or came wrong."""

    indices: list[int]


class ReceiverCommitted(msgspec.Struct, frozen=True):
    """The receiver's verdict: all is there."""


class HandoffGivenUp(msgspec.Struct, frozen=True):
    """Cancelled, or the engine, the receiver or the path to it failed."""

    error: KvrelayError


HandoffEvent: TypeAlias = BlocksReady | PushEnded | PromptComputed | BlocksMissing | ReceiverCommitted | HandoffGivenUp


class Push(msgspec.Struct, frozen=True):
    """Start sending these blocks of the range."""

    indices: list[int]


class AskVerdict(msgspec.Struct, frozen=True):
    """Tell the receiver that all was sent, and wait for what it says."""

    first_token: FirstToken


class StopPushes(msgspec.Struct, frozen=True):
    """Cancel what is being sent and tell the receiver, unless it is the one who failed."""

    error: KvrelayError


class ReleaseBlocks(msgspec.Struct, frozen=True):
    """Nobody needs or reads our blocks any more."""


HandoffCommand: TypeAlias = Push | AskVerdict | StopPushes | ReleaseBlocks


class HandoffLife(msgspec.Struct, frozen=True):
    """A handoff as its sender sees it.

    num_blocks: blocks of the ticket's range
    num_ready:  blocks that the engine has finished; they come in the order of the range
    num_pushes: pushes that may still read our blocks
    round:      how often missing blocks were sent again
    """

    num_blocks: int
    state: HandoffState = HandoffState.PUSHING
    num_ready: int = 0
    num_pushes: int = 0
    round: int = 0
    first_token: FirstToken | None = None

    @property
    def is_over(self) -> bool:
        return self.state is HandoffState.RELEASED

    def story(self) -> str:
        return (
            f"handoff {self.state.value}, {self.num_ready}/{self.num_blocks} blocks ready, "
            f"{self.num_pushes} pushes under way, round {self.round}"
        )

    def validate(self) -> None:
        """Raises InvalidTransition when the fields contradict each other."""
        done = (HandoffState.FINISHING, HandoffState.RELEASED)
        if self.num_pushes < 0 or (self.state in done and self.num_pushes):
            raise InvalidTransition(f"pushes miscounted: {self.story()}")
        if self.state is HandoffState.FINISHING and self.num_ready != self.num_blocks:
            raise InvalidTransition(f"finishing too early: {self.story()}")


def step(life: HandoffLife, event: HandoffEvent) -> tuple[HandoffLife, list[HandoffCommand]]:
    """Next state and what to do about it. Raises InvalidTransition: a fault of ours."""
    match life.state, event:
        case HandoffState.PUSHING, BlocksReady(indices=indices) if life.first_token is None:
            _check_order(life, indices)
            ready = life.num_ready + len(indices)
            return _replace(life, num_ready=ready, num_pushes=life.num_pushes + 1), [Push(indices)]
        case HandoffState.PUSHING, PromptComputed(first_token=first) if life.first_token is None:
            if life.num_ready != life.num_blocks:
                raise InvalidTransition(f"the prompt ended before its blocks were ready: {life.story()}")
            return _ask_when_quiet(_replace(life, first_token=first))
        case HandoffState.PUSHING, PushEnded() if life.num_pushes:
            return _ask_when_quiet(_replace(life, num_pushes=life.num_pushes - 1))
        case HandoffState.FINISHING, BlocksMissing(indices=indices):
            return _push_again(life, indices)
        case HandoffState.FINISHING, ReceiverCommitted():
            return _replace(life, state=HandoffState.RELEASED), [ReleaseBlocks()]
        case ((HandoffState.PUSHING | HandoffState.FINISHING), HandoffGivenUp(error=error)):
            return _abort(life, error)
        case HandoffState.ABORTED, PushEnded() if life.num_pushes:
            return _release_when_quiet(_replace(life, num_pushes=life.num_pushes - 1))
        case HandoffState.ABORTED, BlocksReady() | PromptComputed() | BlocksMissing() | ReceiverCommitted():
            return life, []  # it was under way when we gave up
        case ((HandoffState.ABORTED | HandoffState.RELEASED), HandoffGivenUp()):
            return life, []
        case _:
            raise InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def _ask_when_quiet(life: HandoffLife) -> tuple[HandoffLife, list[HandoffCommand]]:
    if life.num_pushes or life.first_token is None:
        return life, []
    return _replace(life, state=HandoffState.FINISHING), [AskVerdict(life.first_token)]


def _push_again(life: HandoffLife, indices: list[int]) -> tuple[HandoffLife, list[HandoffCommand]]:
    if not indices or not all(0 <= index < life.num_blocks for index in indices):
        return _abort(life, TransferError(f"the receiver misses blocks {indices} that the range does not have"))
    if life.round == MAX_ROUNDS:
        return _abort(life, TransferError(f"{len(indices)} blocks did not arrive in {MAX_ROUNDS} more tries"))
    again = _replace(life, state=HandoffState.PUSHING, round=life.round + 1, num_pushes=1)
    return again, [Push(indices)]


def _abort(life: HandoffLife, error: KvrelayError) -> tuple[HandoffLife, list[HandoffCommand]]:
    aborted, release = _release_when_quiet(_replace(life, state=HandoffState.ABORTED))
    return aborted, [StopPushes(error), *release]


def _release_when_quiet(life: HandoffLife) -> tuple[HandoffLife, list[HandoffCommand]]:
    if life.num_pushes:
        return life, []
    return _replace(life, state=HandoffState.RELEASED), [ReleaseBlocks()]


def _check_order(life: HandoffLife, indices: list[int]) -> None:
    expected = list(range(life.num_ready, life.num_ready + len(indices)))
    if not indices or indices != expected or expected[-1] >= life.num_blocks:
        raise InvalidTransition(f"blocks {indices} are not the next ones: {life.story()}")


def _replace(life: HandoffLife, **changes: object) -> HandoffLife:
    return msgspec.structs.replace(life, **changes)
