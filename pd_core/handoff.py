"""The sending half of a handoff: from a prefill worker's first finished chunk until its blocks are released.

    PUSHING -> FINISHING -> COMMITTED -- quiet --> RELEASED
       \\           \\                             /
        \\___________\\_____> ABORTED ---- quiet --/

Our blocks stay held until the receiver has committed or the handoff is aborted, *and* no push reads them any more:
"sent" is not enough, because what was lost on the way must be sent again. Pushes may end in any order.

The receiver is asked for its verdict together with the last push, not after it: it commits when the last block is
there, and that is what the client's second token waits for. What is missing it can say only when nothing is on its way
any more, which it is told when the last push has ended.
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
    FINISHING = "finishing"  # all is computed; the receiver has been asked for its verdict; pushes may be under way
    COMMITTED = "committed"  # the receiver has all; a push may still read our blocks
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
    """Tell the receiver that all is sent or on its way, and wait for what it says."""

    first_token: FirstToken


class SayAllSent(msgspec.Struct, frozen=True):
    """Tell the receiver that nothing is on its way any more: what it has not got now it may call missing."""


class StopPushes(msgspec.Struct, frozen=True):
    """Cancel what is being sent: nobody needs it any more."""


class Abandon(msgspec.Struct, frozen=True):
    """The handoff has failed; tell the receiver, unless it is the one who failed."""

    error: KvrelayError


class ReleaseBlocks(msgspec.Struct, frozen=True):
    """Nobody needs or reads our blocks any more."""


HandoffCommand: TypeAlias = Push | AskVerdict | SayAllSent | StopPushes | Abandon | ReleaseBlocks


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
        if self.num_pushes < 0 or (self.state is HandoffState.RELEASED and self.num_pushes):
            raise InvalidTransition(f"pushes miscounted: {self.story()}")
        if self.state is HandoffState.COMMITTED and not self.num_pushes:
            raise InvalidTransition(f"nothing reads the blocks, and they are not released: {self.story()}")
        if self.state is HandoffState.PUSHING and self.first_token is not None:
            raise InvalidTransition(f"the prompt is computed, and nobody asks: {self.story()}")
        is_asked = self.state in (HandoffState.FINISHING, HandoffState.COMMITTED)
        if is_asked and (self.num_ready != self.num_blocks or self.first_token is None):
            raise InvalidTransition(f"finishing too early: {self.story()}")


def step(life: HandoffLife, event: HandoffEvent) -> tuple[HandoffLife, list[HandoffCommand]]:
    """Next state and what to do about it. Raises InvalidTransition: a fault of ours."""
    match life.state, event:
        case HandoffState.PUSHING, BlocksReady(indices=indices):
            _check_order(life, indices)
            ready = life.num_ready + len(indices)
            return _replace(life, num_ready=ready, num_pushes=life.num_pushes + 1), [Push(indices)]
        case HandoffState.PUSHING, PromptComputed(first_token=first):
            if life.num_ready != life.num_blocks:
                raise InvalidTransition(f"the prompt ended before its blocks were ready: {life.story()}")
            asked = _replace(life, state=HandoffState.FINISHING, first_token=first)
            return asked, [AskVerdict(first), *_all_sent(asked)]
        case HandoffState.PUSHING, PushEnded() if life.num_pushes:
            return _replace(life, num_pushes=life.num_pushes - 1), []
        case HandoffState.FINISHING, PushEnded() if life.num_pushes:
            ended = _replace(life, num_pushes=life.num_pushes - 1)
            return ended, _all_sent(ended)
        case HandoffState.FINISHING, BlocksMissing(indices=indices):
            return _push_again(life, indices)
        case HandoffState.FINISHING, ReceiverCommitted():
            return _release_when_quiet(_replace(life, state=HandoffState.COMMITTED))
        case HandoffState.COMMITTED, HandoffGivenUp():
            return life, [StopPushes()]  # it has succeeded; a push whose end is late holds our blocks for nothing
        case ((HandoffState.PUSHING | HandoffState.FINISHING), HandoffGivenUp(error=error)):
            return _abort(life, error)
        case ((HandoffState.COMMITTED | HandoffState.ABORTED), PushEnded()) if life.num_pushes:
            return _release_when_quiet(_replace(life, num_pushes=life.num_pushes - 1))
        case HandoffState.ABORTED, BlocksReady() | PromptComputed() | BlocksMissing() | ReceiverCommitted():
            return life, []  # it was under way when we gave up
        case ((HandoffState.ABORTED | HandoffState.RELEASED), HandoffGivenUp()):
            return life, []
        case _:
            raise InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def _all_sent(life: HandoffLife) -> list[HandoffCommand]:
    return [] if life.num_pushes else [SayAllSent()]


def _push_again(life: HandoffLife, indices: list[int]) -> tuple[HandoffLife, list[HandoffCommand]]:
    if life.num_pushes or life.first_token is None:
        return _abort(life, TransferError(f"the receiver misses blocks that are on their way: {life.story()}"))
    if not indices or not all(0 <= index < life.num_blocks for index in indices):
        return _abort(life, TransferError(f"the receiver misses blocks {indices} that the range does not have"))
    if life.round == MAX_ROUNDS:
        return _abort(life, TransferError(f"{len(indices)} blocks did not arrive in {MAX_ROUNDS} more tries"))
    return _replace(life, round=life.round + 1, num_pushes=1), [Push(indices), AskVerdict(life.first_token)]


def _abort(life: HandoffLife, error: KvrelayError) -> tuple[HandoffLife, list[HandoffCommand]]:
    aborted, release = _release_when_quiet(_replace(life, state=HandoffState.ABORTED))
    return aborted, [StopPushes(), Abandon(error), *release]


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
