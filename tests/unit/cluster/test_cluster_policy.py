"""Life of a seat, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.policy import (
    Announce,
    Exited,
    Gone,
    Heard,
    Kill,
    Launch,
    SeatCommand,
    SeatEvent,
    SeatLife,
    SeatLimits,
    SeatState,
    Started,
    StartFailed,
    TimePassed,
    first_boot,
    restart_delay_s,
    step,
)
from pd_core.errors import InvalidTransition

LIMITS = SeatLimits(
    suspect_s=2.0,
    dead_s=10.0,
    start_deadline_s=120.0,
    max_gap_s=1.0,
    first_delay_s=0.2,
    max_delay_s=30.0,
    stable_s=60.0,
)
TICK_S = 0.25


def launched() -> SeatLife:
    life, commands = first_boot("decode-0", LIMITS, now_s=0.0)
    assert commands == [Launch()]
    return life


def running(now_s: float = 1.0) -> SeatLife:
    life = pass_time(launched(), now_s)[0]
    life, commands = step(life, Started(now_s))
    assert commands == [Announce()]
    return life


def pass_time(life: SeatLife, until_s: float) -> tuple[SeatLife, list[SeatCommand]]:
    """Ticks as the shell does, up to `until_s`; all commands on the way."""
    commands: list[SeatCommand] = []
    while life.ticked_s < until_s:
        life, more = step(life, TimePassed(min(life.ticked_s + TICK_S, until_s)))
        commands += more
    return life, commands


def killed(life: SeatLife, now_s: float) -> SeatLife:
    life, _ = step(pass_time(life, now_s)[0], Exited("process 7 died", now_s))
    assert life.state is SeatState.DEAD
    life, commands = step(life, Gone(now_s))
    assert (life.state, commands) == (SeatState.RESTARTING, [])
    return life


def test_a_seat_that_starts_slowly_is_left_alone_until_its_deadline():
    life, commands = pass_time(launched(), 119.9)
    assert (life.state, commands) == (SeatState.STARTING, [])
    life, commands = pass_time(life, 120.0)
    assert life.state is SeatState.DEAD
    assert commands == [Kill("not started within 120 s")]


def test_a_silent_worker_is_suspected_then_killed_and_the_router_hears_of_it_before_the_kill():
    life, commands = pass_time(running(now_s=1.0), 2.9)
    assert (life.state, commands) == (SeatState.RUNNING, [])
    life, commands = pass_time(life, 10.9)
    assert (life.state, commands) == (SeatState.SUSPECT, [])
    life, commands = pass_time(life, 11.0)
    assert life.state is SeatState.DEAD
    assert commands == [Announce(), Kill("silent for 10.0 s")]


def test_a_suspect_that_is_heard_again_runs_on():
    life, _ = pass_time(running(), 5.0)
    assert life.state is SeatState.SUSPECT
    life, commands = step(life, Heard(5.0))
    assert (life.state, commands) == (SeatState.RUNNING, [])
    life, commands = pass_time(life, 14.9)
    assert (life.state, commands) == (SeatState.SUSPECT, [])


def test_a_worker_that_is_heard_every_second_runs_for_ever():
    life = running()
    for second in range(2, 500):
        life, commands = pass_time(life, float(second))
        assert commands == []
        life, commands = step(life, Heard(float(second)))
        assert (life.state, commands) == (SeatState.RUNNING, [])


def test_a_dead_process_is_fenced_before_the_next_boot_begins():
    life, commands = step(running(), Exited("process 7 died", 2.0))
    assert commands == [Announce(), Kill("process 7 died")]
    life, commands = pass_time(life, 50.0)
    assert (life.state, commands) == (SeatState.DEAD, [])  # its process may still be there
    life, _ = step(life, Gone(50.0))
    life, commands = pass_time(life, 50.25)
    assert (life.state, commands) == (SeatState.STARTING, [Launch()])
    assert life.num_boots == 2


def test_a_start_that_fails_is_killed_too_and_the_router_need_not_hear_of_it():
    life, commands = step(launched(), StartFailed("the weights are torn", 1.0))
    assert (life.state, commands) == (SeatState.DEAD, [Kill("the weights are torn")])


def test_failures_in_a_row_wait_longer_and_longer():
    life, now_s, delays = running(), 2.0, []
    for _ in range(12):
        life = killed(life, now_s)
        assert life.retry_at_s is not None
        delays.append(life.retry_at_s - now_s)
        now_s = life.retry_at_s
        life, commands = pass_time(life, now_s)
        assert commands == [Launch()]
        life, _ = step(life, Started(now_s))
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0, 30.0, 30.0])


def test_a_boot_that_ran_long_begins_the_count_anew():
    life, now_s = running(), 2.0
    for _ in range(5):
        life = killed(life, now_s)
        assert life.retry_at_s is not None
        now_s = life.retry_at_s
        life, _ = step(pass_time(life, now_s)[0], Started(now_s))
    assert life.num_failures == 5
    for _ in range(61):
        now_s += 1.0
        life, _ = step(pass_time(life, now_s)[0], Heard(now_s))
    assert killed(life, now_s).num_failures == 1


def test_a_supervisor_that_was_away_blames_nobody():
    life, _ = pass_time(running(), 2.0)
    life, commands = step(life, TimePassed(500.0))
    assert (life.state, commands) == (SeatState.RUNNING, [])
    life, commands = pass_time(life, 508.9)
    assert (life.state, commands) == (SeatState.SUSPECT, [])
    life, commands = pass_time(life, 509.0)
    assert [type(command) for command in commands] == [Announce, Kill]


def test_a_supervisor_that_was_away_does_not_cut_a_start_short():
    life, _ = step(pass_time(launched(), 100.0)[0], TimePassed(1000.0))
    life, commands = pass_time(life, 1019.9)
    assert (life.state, commands) == (SeatState.STARTING, [])
    assert pass_time(life, 1020.0)[1] == [Kill("not started within 120 s")]


def test_news_of_a_boot_that_was_given_up_change_nothing():
    dead, _ = step(running(), Exited("process 7 died", 2.0))
    for late in (Started(3.0), StartFailed("x", 3.0), Heard(3.0), Exited("x", 3.0)):
        assert step(dead, late) == (dead, [])


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (launched(), Heard(1.0)),
        (launched(), Gone(1.0)),
        (running(), Started(2.0)),
        (running(), StartFailed("x", 2.0)),
        (running(), Gone(2.0)),
        (killed(running(), 2.0), Heard(3.0)),
        (killed(running(), 2.0), Exited("x", 3.0)),
        (killed(running(), 2.0), Started(3.0)),
        (killed(running(), 2.0), Gone(3.0)),
    ],
    ids=lambda value: value.state.value if isinstance(value, SeatLife) else type(value).__name__,
)
def test_an_event_that_does_not_fit_raises(life, event):
    with pytest.raises(InvalidTransition, match="does not fit"):
        step(life, event)


@given(st.integers(-3, 10_000))
def test_the_back_off_never_leaves_its_bounds(num_failures):
    assert LIMITS.first_delay_s <= restart_delay_s(num_failures, LIMITS) <= LIMITS.max_delay_s


events = st.one_of(
    st.sampled_from([Started, Heard, Gone, TimePassed, StartFailed, Exited]),
)


@given(st.lists(st.tuples(events, st.floats(0.0, 15.0)), max_size=60))
def test_whatever_happens_the_seat_stays_valid_and_no_two_boots_overlap(happenings):
    life, _ = first_boot("w", LIMITS, 0.0)
    now_s, num_kills, num_gone = 0.0, 0, 0
    for kind, later_s in happenings:
        now_s += later_s
        event: SeatEvent = kind("why", now_s) if kind in (StartFailed, Exited) else kind(now_s)
        try:
            after, commands = step(life, event)
        except InvalidTransition:
            continue
        after.validate()
        num_kills += sum(isinstance(command, Kill) for command in commands)
        num_gone += isinstance(event, Gone)
        if Launch() in commands:
            assert num_kills == num_gone  # every earlier boot is proved gone
        if after.is_alive != life.is_alive:
            assert Announce() in commands
        life = after
    assert life.num_boots == 1 + num_kills - (life.state in (SeatState.DEAD, SeatState.RESTARTING))
