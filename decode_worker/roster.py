"""Everybody on one decode worker, oldest first: who holds which blocks, and what the next step is. Pure.

The roster runs the lives over the pool's ledger and decides by `policy`. It knows no clock, no engine and no router:
time comes in, a StepPlan goes out, and what the step brought comes back as `computed` and `drew`.
"""

from __future__ import annotations

import msgspec

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
from decode_worker.policy import blocks_to_begin, next_batch, prompt_shares, youngest_to_preempt
from pd_core.errors import InvalidTransition, LedgerCorrupt
from pd_core.ledger import BlockLedger, Reservation


class PlannedPart(msgspec.Struct, frozen=True):
    """One sequence's part in a step: positions start .. end - 1; a token is drawn after the last it knows."""

    name: str
    start: int
    end: int
    draws: bool


class StepPlan(msgspec.Struct, frozen=True):
    """preempted: who has given its blocks up since the last plan, in this order; parts: the next step, maybe none."""

    preempted: list[str]
    parts: list[PlannedPart]


class Work(msgspec.Struct, frozen=True):
    """What was computed in one chunk.

    num_new:   tokens of the prompt whose KV was made for the first time
    num_again: tokens whose KV had been there before a preemption
    """

    num_new: int
    num_again: int


class Roster:
    """Not to be asked for a plan, nor told of a departure, while a step is under way that uses the blocks concerned.

    max_batch:    sequences that one step decodes
    chunk_tokens: most prompt tokens of one step, a multiple of 16
    """

    def __init__(self, ledger: BlockLedger, max_batch: int, chunk_tokens: int, ageing_tokens_per_s: float) -> None:
        self._ledger = ledger
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
        self._ageing_tokens_per_s = ageing_tokens_per_s
        self._lives: dict[str, SequenceLife] = {}  # in order of admission: oldest first
        self._tables: dict[str, list[int]] = {}
        self._num_admissions = 0

    def __contains__(self, name: str) -> bool:
        return name in self._lives

    def count(self, *phases: Phase) -> int:
        return sum(life.phase in phases for life in self._lives.values())

    def life(self, name: str) -> SequenceLife:
        """Raises InvalidTransition when it is not here."""
        if name not in self._lives:
            raise InvalidTransition(f"{name} is not here")
        return self._lives[name]

    def table(self, name: str) -> list[int]:
        """Its block table: the very list, which grows with it."""
        return self._tables[name]

    def blocks_needed(self, num_prompt: int, num_limit: int) -> int:
        """Free blocks at which a new request could begin now. Nobody may while somebody waits; see `has_waiting`."""
        return self._room_for(self._newcomer("", num_prompt, num_limit, Phase.WAITING))

    @property
    def has_waiting(self) -> bool:
        return any(life.phase is Phase.WAITING for life in self._lives.values())

    @property
    def num_spare_blocks(self) -> int:
        """Free blocks beyond what is kept for the growth of those that are here; none while somebody waits for some."""
        if self.has_waiting:
            return 0
        return max(0, self._ledger.num_free - sum(life.num_growth_blocks for life in self._lives.values()))

    def try_reserve(self, name: str, num_prompt: int, num_limit: int) -> Reservation | None:
        """Admits a request whose KV comes from elsewhere: its blocks are set aside for a ticket. None: no room now."""
        newcomer = self._newcomer(name, num_prompt, num_limit, Phase.RESERVED)
        if not self._may_begin(newcomer):
            return None
        reservation = self._ledger.try_reserve(newcomer.num_blocks_due)
        self._admit(newcomer)
        return reservation

    def try_admit(self, name: str, num_prompt: int, num_limit: int, now_s: float) -> bool:
        """Admits a request whose prompt is computed here: it gets its blocks at once. False: no room now."""
        newcomer = self._newcomer(name, num_prompt, num_limit, Phase.WAITING)
        if not self._may_begin(newcomer):
            return False
        self._admit(newcomer)
        self._take(newcomer, newcomer.num_blocks_due, now_s)
        return True

    def arrived(self, name: str) -> None:
        """The ledger has made the ticket's blocks its own, and the first token is known."""
        self._feed(name, KvArrived())
        self._tables[name] = self._ledger.holds(name)

    def leave(self, name: str) -> None:
        """It is over; what it holds is free. A ticket's blocks are the ticket's to give back."""
        if self.life(name).holds_blocks:
            self._ledger.release(name)
        self._feed(name, Ended())
        del self._lives[name]
        self._tables.pop(name, None)

    def plan(self, now_s: float) -> StepPlan:
        """What is to be run next. Grows what runs, preempts for it, and lets those go on that wait."""
        preempted = self._grow(now_s)
        self._go_on(now_s)
        lives = list(self._lives.values())
        parts = [
            PlannedPart(life.name, life.num_computed, life.num_tokens, draws=True)
            for life in next_batch(lives, self._max_batch)
        ]
        computing = [life for life in lives if life.phase is Phase.COMPUTING]
        if computing:
            parts += self._shares_of(computing, now_s)
        return StepPlan(preempted, parts)

    def computed(self, part: PlannedPart, now_s: float) -> Work | None:
        """The step has made the KV of the part's positions; what that was, None for a decode step."""
        life = self.life(part.name)
        if life.phase is not Phase.COMPUTING:
            return None  # `drew` tells it all
        self._feed(part.name, ChunkComputed(part.end, now_s))
        again_end = max(part.start, min(part.end, life.num_known))
        return Work(max(0, min(part.end, life.num_prompt) - again_end), again_end - part.start)

    def drew(self, name: str) -> None:
        """The step has drawn its next token."""
        self._feed(name, TokenDrawn())

    def story(self) -> str:
        return "; ".join(life.story() for life in self._lives.values()) or "nobody is here"

    def validate(self) -> None:
        """Raises InvalidTransition or LedgerCorrupt when lives, tables and ledger contradict each other."""
        for life in self._lives.values():
            life.validate()
            held = self._ledger.holds(life.name)
            if held != self._tables.get(life.name, []) or len(held) != life.num_blocks:
                raise LedgerCorrupt(f"it holds {held}, its table is {self._tables.get(life.name)}: {life.story()}")
        order = [life.seniority for life in self._lives.values()]
        if order != sorted(order):
            raise InvalidTransition(f"not in order of admission: {self.story()}")

    def _newcomer(self, name: str, num_prompt: int, num_limit: int, phase: Phase) -> SequenceLife:
        return SequenceLife(name, self._num_admissions, phase, num_prompt, num_limit, num_tokens=num_prompt)

    def _may_begin(self, life: SequenceLife) -> bool:
        return not self.has_waiting and self._room_for(life) <= self._ledger.num_free

    def _room_for(self, life: SequenceLife) -> int:
        return blocks_to_begin(life, (other for other in self._lives.values() if other.phase is not Phase.WAITING))

    def _admit(self, life: SequenceLife) -> None:
        if life.name in self._lives:
            raise InvalidTransition(f"{life.name} is here already")
        self._num_admissions += 1
        self._lives[life.name] = life

    def _shares_of(self, computing: list[SequenceLife], now_s: float) -> list[PlannedPart]:
        shares = prompt_shares(computing, now_s, self._chunk_tokens, self._ageing_tokens_per_s)
        chosen = [(computing[share.index], share) for share in shares]
        return [
            PlannedPart(life.name, share.start, share.end, draws=share.end == life.num_tokens) for life, share in chosen
        ]

    def _grow(self, now_s: float) -> list[str]:
        """Everybody who decodes next gets the block that it needs, oldest first, or is preempted."""
        preempted: list[str] = []
        for planned in next_batch(list(self._lives.values()), self._max_batch):
            while (life := self._lives[planned.name]).phase is Phase.RUNNING and life.num_blocks < life.num_blocks_due:
                if not self._take(life, life.num_blocks_due - life.num_blocks, now_s):
                    preempted.append(self._preempt_youngest())
        return preempted

    def _preempt_youngest(self) -> str:
        youngest = youngest_to_preempt(list(self._lives.values()))
        if youngest is None:
            raise InvalidTransition(f"nobody holds blocks: {self.story()}")
        self._ledger.release(youngest.name)
        self._tables[youngest.name] = []
        self._feed(youngest.name, BlocksGivenUp())
        return youngest.name

    def _go_on(self, now_s: float) -> None:
        """The oldest that waits takes blocks for all its tokens, then the next; none overtakes another."""
        for life in [life for life in self._lives.values() if life.phase is Phase.WAITING]:
            if self._room_for(life) > self._ledger.num_free:
                return
            self._take(life, life.num_blocks_due, now_s)

    def _take(self, life: SequenceLife, num_blocks: int, now_s: float) -> bool:
        taken = self._ledger.try_hold(life.name, num_blocks)
        if taken is None:
            return False
        self._tables.setdefault(life.name, []).extend(taken)
        self._feed(life.name, BlocksTaken(num_blocks, now_s))
        return True

    def _feed(self, name: str, event: LifeEvent) -> None:
        self._lives[name] = step(self.life(name), event)
