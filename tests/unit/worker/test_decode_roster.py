"""Blocks under pressure: what is admitted, who is preempted, and what a step is."""

from __future__ import annotations

import pytest
from roster_sim import CHUNK, B, Sim

from decode_worker.life import (
    Phase,
    SequenceLife,
)
from decode_worker.roster import PlannedPart, Work
from pd_core.errors import InvalidTransition, LedgerCorrupt
from pd_core.layout import GROWTH_BLOCKS

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
