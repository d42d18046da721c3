"""Blocks under pressure, in thousands of orders: everybody who was admitted ends, the oldest first, whatever comes,
breaks or leaves."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from roster_sim import B, Sim

from pd_core.layout import blocks_for

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
