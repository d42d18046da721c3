"""Blocks under pressure: everybody who was admitted ends, the oldest first, whatever comes, breaks or leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from decode_worker.policy import GROWTH_BLOCKS, most_positions
from decode_worker.roster import PlannedPart, Roster, Work
from pd_core.errors import InvalidTransition, LedgerCorrupt
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


# the table


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


# what is admitted


def test_a_prompt_is_admitted_with_room_for_its_own_growth_and_no_more_than_it_can_use() -> None:
    sim = Sim(num_blocks=5)
    assert sim.ticket("a", 3 * B, 200) is True  # three, and growth for two
    assert Sim(num_blocks=4).ticket("a", 3 * B, 200) is False
    assert Sim(num_blocks=4).ticket("a", 3 * B, B) is True  # it can only ever need one more
    assert Sim(num_blocks=3).ticket("a", 3 * B, 1) is True  # of the last token no KV is made


def test_only_the_prompts_blocks_are_taken() -> None:
    sim = Sim(num_blocks=8)
    assert sim.ticket("a", 3 * B, 200)
    assert sim.ledger.counts().reserved == 3
    assert sim.local("b", B, 1)
    assert sim.ledger.counts().held == 1
    sim.check()


def test_growth_of_those_who_are_here_is_left_free() -> None:
    sim = Sim(num_blocks=4 * B)
    names = [f"r{number}" for number in range(99)]
    admitted = [name for name in names if sim.ticket(name, 2 * B, 200)]
    assert len(admitted) * (2 + GROWTH_BLOCKS) == sim.num_blocks
    assert sim.ledger.num_free == len(admitted) * GROWTH_BLOCKS


def test_the_same_request_cannot_be_here_twice() -> None:
    sim = Sim(num_blocks=8)
    assert sim.ticket("a", B, 2)
    with pytest.raises(InvalidTransition, match="here already"):
        sim.ticket("a", B, 2)


# who is preempted


def full_pool(*names: str, max_tokens: int = 99) -> Sim:
    """Each has two blocks, both full, and no block is free: nobody can grow."""
    sim = Sim(num_blocks=2 * len(names))
    for name in names:
        sim.ledger.try_hold("in the way", 0)
        sim.roster._admit(SequenceLife(name, sim.roster._num_admissions, Phase.WAITING, 2 * B, 4 * B, 2 * B))
        sim.roster._take(sim.roster.life(name), 2, 0.0)
        sim.roster.computed(PlannedPart(name, 0, 2 * B, draws=True), 0.0)
        sim.roster.drew(name)
        sim.max_tokens[name], sim.made[name] = max_tokens, 1
    sim.ledger.release("in the way")
    sim.check()
    return sim


def test_one_that_cannot_grow_preempts_the_youngest() -> None:
    sim = full_pool("a", "b", "c", "d")
    parts = sim.tick()
    assert sim.preempted == ["d", "c"], "the blocks of d are enough for a and b; then c is the youngest itself"
    assert [part.name for part in parts] == ["a", "b"]


def test_each_older_one_grows_before_a_younger_one_does() -> None:
    sim = full_pool("a", "b", "c")
    parts = sim.tick()
    assert sim.preempted == ["c"]
    assert [part.name for part in parts] == ["a", "b"]
    assert [len(sim.roster.table(name)) for name in "ab"] == [3, 3]
    assert sim.phase("c") is Phase.WAITING


def test_the_youngest_preempts_itself_when_nobody_younger_holds_blocks() -> None:
    sim = full_pool("a", "b")
    sim.tick()
    assert sim.preempted == ["b"]
    assert sim.phase("a") is Phase.RUNNING


def test_a_ticket_is_not_preempted_however_young() -> None:
    sim = Sim(num_blocks=6)
    assert sim.local("old", B, 4 * B)
    assert sim.ticket("young", B, 2)
    while sim.phase("old") is not Phase.WAITING:
        sim.ledger.try_hold("in the way", sim.ledger.num_free)
        sim.tick()
    assert sim.phase("young") is Phase.RESERVED
    assert sim.tick() == []
    sim.ledger.release("in the way")
    sim.commit("young")
    while sim.made:
        assert sim.tick()
    assert sorted(sim.finished) == ["old", "young"]


def test_who_waits_comes_before_everybody_who_is_not_here_yet() -> None:
    sim = full_pool("a", "b")
    sim.tick()
    assert not sim.ticket("new", 1, 1)
    assert not sim.local("newer", 1, 1)
    sim.leave("a")
    sim.tick()
    assert sim.phase("b") is Phase.RUNNING
    assert sim.made["b"] == 2
    sim.leave("b")
    assert sim.ticket("new", 1, 1)


def test_nobody_who_waits_overtakes_an_older_one() -> None:
    sim = Sim(num_blocks=16)
    for name, num_prompt in (("a", 1), ("big", 5 * B), ("small", 1)):
        assert sim.local(name, num_prompt, 2 * B)
    while sim.roster.count(Phase.COMPUTING):
        sim.tick()
    assert [sim.roster._preempt_youngest() for _ in range(2)] == ["small", "big"]
    sim.ledger.try_hold("in the way", sim.ledger.num_free - 5)
    sim.tick()
    assert sim.phase("big") is sim.phase("small") is Phase.WAITING, "there is room for the small one alone"
    sim.ledger.release("in the way")
    sim.tick()
    assert not sim.roster.has_waiting


# what a step is


def test_a_step_decodes_the_oldest_and_computes_chunks_up_to_the_budget() -> None:
    sim = Sim(num_blocks=64, max_batch=2)
    for name in ("a", "b", "c"):
        sim.ticket(name, B, 50)
        sim.commit(name)
    sim.local("short", 10, 5)
    sim.local("long", 5 * B, 5)
    sim.local("other", 20, 5)
    parts = sim.tick()
    assert [(part.name, part.start, part.end, part.draws) for part in parts] == [
        ("a", B, B + 1, True),
        ("b", B, B + 1, True),
        ("short", 0, 10, True),
        ("other", 0, 20, True),
    ]
    long = [next(part for part in sim.tick() if part.name == "long") for _ in range(2)]
    assert [(part.start, part.end, part.draws) for part in long] == [(0, CHUNK, False), (CHUNK, 5 * B, True)]


def test_who_was_preempted_is_computed_before_new_prompts() -> None:
    sim = Sim(num_blocks=64)
    sim.local("old", 6 * B, 5)
    sim.tick()
    sim.tick()
    assert sim.phase("old") is Phase.RUNNING
    sim.roster._preempt_youngest()
    sim.roster._go_on(sim.now_s)
    sim.local("new", 10, 5)
    assert [part.name for part in sim.tick()] == ["old"]
    assert [part.name for part in sim.tick()] == ["old", "new"]


def test_what_is_computed_again_is_told_from_what_is_new() -> None:
    sim = Sim(num_blocks=64)
    sim.local("a", 6 * B, 20)
    first = sim.roster.plan(0.0).parts[0]
    assert sim.roster.computed(first, 0.0) == Work(num_new=CHUNK, num_again=0)
    sim.roster._preempt_youngest()
    works = [sim.roster.computed(sim.roster.plan(0.0).parts[0], 0.0) for _ in range(2)]
    assert works == [Work(num_new=0, num_again=CHUNK), Work(num_new=6 * B - CHUNK, num_again=0)]
    sim.roster.drew("a")
    decoded = sim.roster.plan(0.0).parts[0]
    assert sim.roster.computed(decoded, 0.0) is None


def test_a_table_that_the_ledger_does_not_know_is_found() -> None:
    sim = Sim(num_blocks=8)
    sim.local("a", B, 5)
    sim.roster.table("a").append(7)
    with pytest.raises(LedgerCorrupt, match="a "):
        sim.roster.validate()


# thousands of orders

SIZES = st.tuples(st.integers(1, 4 * B), st.integers(1, 10 * B))


def finish_all(sim: Sim, release: Callable[[], None] = lambda: None) -> None:
    """Runs until nobody is left; every tick is progress for the oldest that is not held up by a ticket."""
    limit = 50 + sum(20 + 4 * left for left in sim.max_tokens.values()) * 4
    while sim.made or sim.quarantine:
        release()
        parts = sim.tick()
        if not sim.tickets and not sim.quarantine and sim.made:
            assert parts, f"a deadlock: {sim.roster.story()}"
        limit -= 1
        assert limit, f"a livelock: {sim.roster.story()}"
    assert sim.ledger.counts().is_idle


@given(st.lists(SIZES, min_size=1, max_size=10), st.integers(0, 12), st.integers(1, 5), st.booleans())
@settings(deadline=None, max_examples=120)
def test_all_prompts_computed_here_end_in_a_pool_as_small_as_the_largest_of_them(
    sizes: list[tuple[int, int]], num_spare: int, max_batch: int, is_all_at_once: bool
) -> None:
    largest = max(blocks_for(num_prompt + max_tokens) for num_prompt, max_tokens in sizes)
    sim = Sim(num_blocks=largest + num_spare, max_batch=max_batch)
    for number, (num_prompt, max_tokens) in enumerate(sizes):
        while not sim.local(f"r{number}", num_prompt, max_tokens):
            assert sim.made, "an empty pool takes every request that fits it"
            sim.tick()
        if not is_all_at_once:
            sim.tick()
    finish_all(sim)
    assert len(sim.finished) == len(sizes)


@given(st.integers(0, 1 << 32), st.integers(1, 5), st.integers(0, 14))
@settings(deadline=None, max_examples=300)
def test_in_any_order_of_tickets_commits_aborts_departures_and_steps_everybody_ends_and_the_ledger_adds_up(
    seed: int, max_batch: int, num_spare: int
) -> None:
    chance = random.Random(seed)
    largest = 14
    sim = Sim(num_blocks=largest + num_spare, max_batch=max_batch)
    seniority: list[str] = []
    for number in range(chance.randrange(10, 60)):
        match chance.choice(["ticket", "local", "commit", "abort", "leave", "quiet", "tick", "tick", "tick"]):
            case "ticket" | "local" as way:
                admit = sim.ticket if way == "ticket" else sim.local
                waiting = sim.roster.has_waiting
                admitted = admit(f"r{number}", chance.randrange(1, 4 * B), chance.randrange(1, 10 * B))
                assert not (admitted and waiting), "a newcomer came before one that waits"
                seniority += [f"r{number}"] * admitted
            case "commit" if sim.tickets:
                sim.commit(chance.choice(list(sim.tickets)))
            case "abort" if sim.tickets:
                sim.abort(chance.choice(list(sim.tickets)))
            case "leave" if sim.made.keys() - sim.tickets.keys():
                sim.leave(chance.choice(sorted(sim.made.keys() - sim.tickets.keys())))
            case "quiet" if sim.quarantine:
                sim.ledger.end_quarantine(sim.quarantine.pop())
            case _:
                holding = [name for name in seniority if name in sim.made and sim.roster.life(name).holds_blocks]
                before = len(sim.preempted)
                sim.tick()
                victims = sim.preempted[before:]
                # the youngest that hold blocks go, one after the other
                assert victims == holding[::-1][: len(victims)]
                if not sim.tickets and not sim.quarantine:
                    assert not holding or holding[0] not in victims, "the oldest gets through"
        sim.check()

    def release() -> None:
        if sim.tickets and chance.random() < 0.3:
            sim.commit(chance.choice(list(sim.tickets)))
        if sim.quarantine and chance.random() < 0.3:
            sim.ledger.end_quarantine(sim.quarantine.pop())

    finish_all(sim, release)


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=30)
def test_a_stream_of_newcomers_does_not_keep_anybody_who_was_admitted_from_ending(seed: int) -> None:
    """As many as the worker lets in, for ever: nobody is overtaken by more than the few that were let in before."""
    chance = random.Random(seed)
    sim = Sim(num_blocks=16, max_batch=8)
    admitted: dict[str, int] = {}
    for tick in range(600):
        if sim.local(f"r{tick}", chance.randrange(1, 5 * B), chance.randrange(1, 5 * B)):
            admitted[f"r{tick}"] = tick
        sim.tick()
        oldest = min((admitted[name] for name in sim.made), default=tick)
        # Eight at most are here, each with at most 5 B tokens to make and to make again.
        assert tick - oldest < 8 * 6 * B, sim.roster.story()
    assert len(sim.finished) > 30


def test_thirty_two_prompts_of_five_blocks_with_three_to_make_pass_a_pool_of_sixteen() -> None:
    sim = Sim(num_blocks=16, max_batch=16, chunk_tokens=2 * B)
    left = [f"r{number}" for number in range(32)]
    ticks_without_progress = 0
    while len(sim.finished) < 32:
        if left and sim.local(left[0], 5 * B, 3 * B):
            left.pop(0)
        ticks_without_progress = 0 if sim.tick() else ticks_without_progress + 1
        assert ticks_without_progress == 0
    assert not left
