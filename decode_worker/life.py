"""Life of one request on a decode worker, as far as it concerns blocks and steps. Pure.

            KvArrived
    RESERVED ----------------------> RUNNING ---.
                        TokenDrawn    ^   |     |
    (StartBoth) ---> COMPUTING -------'   |     | Ended, from anywhere
                      ^     |             |     v
           BlocksTaken|     v BlocksGivenUp    OVER
                      '-- WAITING <-------'

RESERVED:  its blocks are a ticket's: it is never preempted
WAITING:   preempted: it holds nothing
COMPUTING: it holds blocks for all its tokens, and their KV is made in chunks
RUNNING:   KV of all its tokens but the last is in its blocks; every step runs that one and draws the next

    tokens:     0 ............ num_computed | ... num_tokens - 1 | ............ num_limit
                |----- KV in our blocks ----|---- to be made ----|--- not drawn yet ---|
Of the last token that it may make no KV is needed: num_limit = prompt + max_tokens - 1.

An event that the table does not have for a state raises InvalidTransition and changes nothing.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from pd_core.errors import InvalidTransition
from pd_core.layout import blocks_for, growth_room


class Phase(enum.Enum):
    RESERVED = "reserved"
    WAITING = "waiting"
    COMPUTING = "computing"
    RUNNING = "running"
    OVER = "over"


class KvArrived(msgspec.Struct, frozen=True):
    """The handoff is committed: the ticket's blocks are ours, with the prompt's KV, and the first token is known."""


class BlocksTaken(msgspec.Struct, frozen=True):
    """So many more blocks are ours: for all tokens of one that waited, or for the next token of one that runs."""

    num_blocks: int
    now_s: float


class ChunkComputed(msgspec.Struct, frozen=True):
    """KV of positions up to `end` is in our blocks; a token that came of it is an event of its own."""

    end: int
    now_s: float


class TokenDrawn(msgspec.Struct, frozen=True):
    """One token more: after the last chunk, or by a step of one that runs."""


class BlocksGivenUp(msgspec.Struct, frozen=True):
    """Preempted: an older one needs its blocks."""


class Ended(msgspec.Struct, frozen=True):
    """After its last token, by an error, or because nobody wants it."""


LifeEvent: TypeAlias = KvArrived | BlocksTaken | ChunkComputed | TokenDrawn | BlocksGivenUp | Ended


class SequenceLife(msgspec.Struct, frozen=True):
    """A request and how far it is.

    name:        its name in the ledger
    seniority:   count of admissions: the lower, the older
    num_prompt:  tokens that it came with
    num_limit:   most positions whose KV it can ever need
    num_tokens:  tokens that are known: the prompt and what was made
    num_computed, num_blocks: positions whose KV is in our blocks, and how many these are
    num_known:   positions whose KV was ever made: what is below is recomputed
    num_preemptions: how often it gave its blocks away
    waits_since_s: when it had its last chunk, or got the blocks to begin
    """

    name: str
    seniority: int
    phase: Phase
    num_prompt: int
    num_limit: int
    num_tokens: int
    num_computed: int = 0
    num_blocks: int = 0
    num_known: int = 0
    num_preemptions: int = 0
    waits_since_s: float = 0.0

    @property
    def holds_blocks(self) -> bool:
        """Whether it could give any away."""
        return self.phase in (Phase.COMPUTING, Phase.RUNNING)

    @property
    def is_recomputed(self) -> bool:
        return self.num_preemptions > 0

    @property
    def num_blocks_due(self) -> int:
        """Blocks that its next step needs."""
        return blocks_for(self.num_tokens)

    @property
    def num_growth_blocks(self) -> int:
        """Blocks that are kept free for it when another begins, beyond those that it has, or needs to begin itself."""
        has = self.num_blocks if self.holds_blocks else self.num_blocks_due
        return growth_room(has, blocks_for(self.num_limit))

    def story(self) -> str:
        return (
            f"{self.name} (admission {self.seniority}) {self.phase.value}, KV of {self.num_computed}/{self.num_tokens} "
            f"tokens of at most {self.num_limit}, {self.num_blocks} blocks, {self.num_preemptions} preemptions"
        )

    def validate(self) -> None:
        """Raises InvalidTransition when the fields contradict each other."""
        if not 0 <= self.num_computed <= self.num_tokens <= self.num_limit + 1:
            raise InvalidTransition(f"tokens miscounted: {self.story()}")
        if not self.holds_blocks and self.phase is not Phase.OVER and (self.num_blocks or self.num_computed):
            raise InvalidTransition(f"it holds what it may not hold: {self.story()}")
        if self.holds_blocks and self.num_blocks < blocks_for(self.num_computed):
            raise InvalidTransition(f"KV outside its blocks: {self.story()}")
        if self.phase is Phase.COMPUTING and self.num_blocks < self.num_blocks_due:
            raise InvalidTransition(f"a prompt without all its blocks: {self.story()}")
        if self.phase is Phase.RUNNING and self.num_computed != self.num_tokens - 1:
            raise InvalidTransition(f"it runs with KV missing: {self.story()}")


def step(life: SequenceLife, event: LifeEvent) -> SequenceLife:
    """The next state. Raises InvalidTransition: a fault of ours."""
    match life.phase, event:
        case Phase.RUNNING, TokenDrawn() if life.num_blocks >= life.num_blocks_due:
            return _replace(
                life, num_computed=life.num_tokens, num_known=life.num_tokens, num_tokens=life.num_tokens + 1
            )
        case Phase.RESERVED, KvArrived():
            return _replace(
                life,
                phase=Phase.RUNNING,
                num_computed=life.num_tokens,
                num_known=life.num_tokens,
                num_tokens=life.num_tokens + 1,
                num_blocks=blocks_for(life.num_tokens),
            )
        case Phase.WAITING, BlocksTaken(num_blocks=num_blocks, now_s=now_s) if num_blocks >= life.num_blocks_due:
            return _replace(life, phase=Phase.COMPUTING, num_blocks=num_blocks, waits_since_s=now_s)
        case Phase.RUNNING, BlocksTaken(num_blocks=num_blocks) if num_blocks > 0:
            return _replace(life, num_blocks=life.num_blocks + num_blocks)
        case Phase.COMPUTING, ChunkComputed(end=end, now_s=now_s) if life.num_computed < end <= life.num_tokens:
            return _replace(life, num_computed=end, num_known=max(life.num_known, end), waits_since_s=now_s)
        case Phase.COMPUTING, TokenDrawn() if life.num_computed == life.num_tokens:
            return _replace(life, phase=Phase.RUNNING, num_tokens=life.num_tokens + 1)
        case Phase.COMPUTING | Phase.RUNNING, BlocksGivenUp():
            return _replace(
                life, phase=Phase.WAITING, num_computed=0, num_blocks=0, num_preemptions=life.num_preemptions + 1
            )
        case Phase.RESERVED | Phase.WAITING | Phase.COMPUTING | Phase.RUNNING, Ended():
            return _replace(life, phase=Phase.OVER)
        case _:
            raise InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def _replace(life: SequenceLife, **changes: object) -> SequenceLife:
    return msgspec.structs.replace(life, **changes)
