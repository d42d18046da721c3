from __future__ import annotations

from router.step_clock import StepClock, StepDeadlines

STEPS = StepDeadlines(reserve_s=5, first_token_s=60, prompt_token_s=0.1, next_token_s=30)


def test_each_step_has_a_deadline_of_its_own() -> None:
    clock = StepClock(STEPS)
    assert not clock.is_late(1e9, 0.0)  # it waits in the queue, which has a timeout itself
    clock.placed(100.0)
    assert (clock.is_late(104.9, 0.0), clock.is_late(105.0, 0.0)) == (False, True)
    clock.taken(20, 100.0)
    assert (clock.is_late(161.9, 0.0), clock.is_late(162.0, 0.0)) == (False, True)
    clock.token_came(100.0)
    assert (clock.is_late(129.9, 0.0), clock.is_late(130.0, 0.0)) == (False, True)
    clock.stop()
    assert not clock.is_late(1e9, 0.0)


def test_a_preempted_sequence_may_wait_as_long_as_its_worker_gets_on() -> None:
    clock = StepClock(STEPS)
    clock.token_came(100.0)
    clock.preempted(110.0)
    for now_s in (130.0, 160.0, 500.0):
        assert not clock.is_late(now_s, progress_s=now_s - 1)
    assert not clock.is_late(529.9, progress_s=500.0)
    assert clock.is_late(530.0, progress_s=500.0)


def test_progress_from_before_the_preemption_does_not_make_it_late_at_once() -> None:
    clock = StepClock(STEPS)
    clock.token_came(100.0)
    clock.preempted(129.0)
    assert not clock.is_late(131.0, progress_s=100.0)
    assert clock.is_late(159.0, progress_s=100.0)


def test_when_it_goes_on_the_usual_deadline_holds_again() -> None:
    clock = StepClock(STEPS)
    clock.token_came(100.0)
    clock.preempted(110.0)
    clock.token_came(200.0)
    assert not clock.is_preempted
    assert clock.is_late(230.0, progress_s=229.0)
