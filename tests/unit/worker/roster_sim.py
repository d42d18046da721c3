"""A decode worker that is nothing but its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.life import (
    Phase,
)
from decode_worker.policy import most_positions
from decode_worker.roster import PlannedPart, Roster
from pd_core.layout import BLOCK_TOKENS, blocks_for
from pd_core.ledger import BlockLedger

B = BLOCK_TOKENS
CHUNK = 4 * B


@dataclass
class Sim:
    """A decode worker without anything but its decisions: one step a tick."""

    num_blocks: int
    max_batch: int = 4
    chunk_tokens: int = CHUNK
    now_s: float = 0.0
    max_tokens: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    tickets: dict[str, int] = field(default_factory=dict)
    quarantine: list[int] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = BlockLedger(self.num_blocks, "boot")
        self.roster = Roster(self.ledger, self.max_batch, self.chunk_tokens, 200.0)

    def check(self) -> None:
        self.ledger.validate()
        self.roster.validate()

    def ticket(self, name: str, num_prompt: int, max_tokens: int) -> bool:
        reservation = self.roster.try_reserve(name, num_prompt, most_positions(num_prompt, max_tokens))
        if reservation is None:
            return False
        self.tickets[name] = reservation.epoch
        self.max_tokens[name], self.made[name] = max_tokens, 0
        return True

    def local(self, name: str, num_prompt: int, max_tokens: int) -> bool:
        if not self.roster.try_admit(name, num_prompt, most_positions(num_prompt, max_tokens), self.now_s):
            return False
        self.max_tokens[name], self.made[name] = max_tokens, 0
        return True

    def commit(self, name: str) -> None:
        self.ledger.commit(self.tickets.pop(name), name)
        self.roster.arrived(name)
        self._made_one(name)

    def abort(self, name: str) -> None:
        epoch = self.tickets.pop(name)
        self.ledger.abort(epoch)
        self.quarantine.append(epoch)
        self.roster.leave(name)
        del self.made[name]

    def leave(self, name: str) -> None:
        self.roster.leave(name)
        del self.made[name]

    def tick(self) -> list[PlannedPart]:
        """Plans and runs one step; who was preempted is in `preempted`."""
        plan = self.roster.plan(self.now_s)
        self.preempted += plan.preempted
        self.check()
        self.now_s += 0.01
        for part in plan.parts:
            assert len(self.roster.table(part.name)) >= blocks_for(part.end)
            self.roster.computed(part, self.now_s)
            if part.draws:
                self.roster.drew(part.name)
                self._made_one(part.name)
        self.check()
        return plan.parts

    def phase(self, name: str) -> Phase:
        return self.roster.life(name).phase

    def _made_one(self, name: str) -> None:
        self.made[name] += 1
        if self.made[name] == self.max_tokens[name]:
            self.roster.leave(name)
            self.finished.append(name)
            del self.made[name]
