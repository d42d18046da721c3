"""Life of a seat: one place in the cluster (the router, a worker) that an actor fills, boot after boot.

                      ,--------------- heard ---------------.
                      v                                     |
    STARTING --> RUNNING -- silent for suspect_s --> SUSPECT
       |   ^        |                                   |  silent for dead_s
       |   |        |  exited                           v
       `---|--------+-------------------------------> DEAD -- process gone --> RESTARTING
     failed, late                                                                 |
           `--------------------------- the back-off is over --------------------'

A seat that is merely slow to start is left alone until start_deadline_s. DEAD lasts until the old process is proved
gone, so that two boots never share cores and blocks. Failures in a row wait longer each time; a boot that ran for
stable_s begins the count anew.

The machine knows no clock: `now_s` comes in with the event. An event that the table does not have for a state raises
InvalidTransition and changes nothing.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from pd_core.errors import InvalidTransition


class SeatState(enum.Enum):
    STARTING = "starting"  # an actor was launched and has not said yet where it can be reached
    RUNNING = "running"  # it can be reached and is heard
    SUSPECT = "suspect"  # it was not heard for suspect_s
    DEAD = "dead"  # given up; its process may still exist
    RESTARTING = "restarting"  # its process is gone; the next boot waits for the back-off


class SeatLimits(msgspec.Struct, frozen=True):
    """All times of a seat's life, in seconds.

    start_deadline_s: from launch to the actor's answer
    max_gap_s:        when no time event came for longer than this, the supervisor itself was away: nobody's silence
    first_delay_s, max_delay_s: back-off before the next boot; doubles with every failure in a row
    stable_s:         a boot that ran this long does not count as a failure in a row
    """

    suspect_s: float = 2.0
    dead_s: float = 10.0
    start_deadline_s: float = 120.0
    max_gap_s: float = 1.0
    first_delay_s: float = 0.2
    max_delay_s: float = 30.0
    stable_s: float = 60.0


class Started(msgspec.Struct, frozen=True):
    """The actor can be reached."""

    now_s: float


class StartFailed(msgspec.Struct, frozen=True):
    """The actor could not be made, or died or raised before it could be reached."""

    reason: str
    now_s: float


class Heard(msgspec.Struct, frozen=True):
    """A heartbeat of this boot."""

    now_s: float


class Exited(msgspec.Struct, frozen=True):
    """The process ended without being asked to."""

    reason: str
    now_s: float


class Gone(msgspec.Struct, frozen=True):
    """The killed process does not exist any more."""

    now_s: float


class TimePassed(msgspec.Struct, frozen=True):
    now_s: float


SeatEvent: TypeAlias = Started | StartFailed | Heard | Exited | Gone | TimePassed


class Launch(msgspec.Struct, frozen=True):
    """Begin a new boot, with a new incarnation."""


class Announce(msgspec.Struct, frozen=True):
    """The set of those who can be given work has changed."""


class Kill(msgspec.Struct, frozen=True):
    """End the process for certain, and say when it is gone."""

    reason: str


SeatCommand: TypeAlias = Launch | Announce | Kill


class SeatLife(msgspec.Struct, frozen=True):
    """A seat and what is known of its present boot.

    since_s:      when `state` began
    heard_s:      the last sign of life
    ticked_s:     the last time event
    num_boots:    launches so far
    num_failures: boots in a row that ended before stable_s
    started_s:    when the present boot could first be reached; None before
    retry_at_s:   when RESTARTING is over
    reason:       why the last boot ended
    """

    name: str
    limits: SeatLimits
    since_s: float
    heard_s: float
    ticked_s: float
    state: SeatState = SeatState.STARTING
    num_boots: int = 1
    num_failures: int = 0
    started_s: float | None = None
    retry_at_s: float | None = None
    reason: str | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the router may know of it. A suspect stays: the router's own heartbeats decide what it is given."""
        return self.state in (SeatState.RUNNING, SeatState.SUSPECT)

    def story(self) -> str:
        why = f", last end: {self.reason}" if self.reason else ""
        return f"{self.name} {self.state.value}, boot {self.num_boots}, {self.num_failures} failures in a row{why}"

    def validate(self) -> None:
        """Raises InvalidTransition when the fields contradict each other."""
        if self.is_alive and self.started_s is None:
            raise InvalidTransition(f"alive but never started: {self.story()}")
        if (self.state is SeatState.RESTARTING) != (self.retry_at_s is not None):
            raise InvalidTransition(f"back-off miscounted: {self.story()}")
        if self.num_failures < 0 or self.num_boots < 1:
            raise InvalidTransition(f"miscounted: {self.story()}")


def first_boot(name: str, limits: SeatLimits, now_s: float) -> tuple[SeatLife, list[SeatCommand]]:
    """A seat that is being filled for the first time."""
    return SeatLife(name=name, limits=limits, since_s=now_s, heard_s=now_s, ticked_s=now_s), [Launch()]


def restart_delay_s(num_failures: int, limits: SeatLimits) -> float:
    """Back-off after so many failures in a row; doubles, with a ceiling."""
    doublings = min(max(num_failures - 1, 0), 64)  # 2.0**64 x anything is beyond every ceiling
    return float(min(limits.first_delay_s * 2.0**doublings, limits.max_delay_s))


def step(life: SeatLife, event: SeatEvent) -> tuple[SeatLife, list[SeatCommand]]:
    """Next state and what to do about it. Raises InvalidTransition: a fault of ours."""
    match life.state, event:
        case SeatState.STARTING, Started(now_s=now_s):
            running = _enter(life, SeatState.RUNNING, now_s, heard_s=now_s, started_s=now_s)
            return running, [Announce()]
        case SeatState.STARTING, StartFailed(reason=reason, now_s=now_s):
            return _give_up(life, reason, now_s)
        case ((SeatState.RUNNING | SeatState.SUSPECT), Heard(now_s=now_s)):
            if life.state is SeatState.SUSPECT:
                life = _enter(life, SeatState.RUNNING, now_s)
            return _replace(life, heard_s=max(life.heard_s, now_s)), []
        case ((SeatState.STARTING | SeatState.RUNNING | SeatState.SUSPECT), Exited(reason=reason, now_s=now_s)):
            return _give_up(life, reason, now_s)
        case _, TimePassed(now_s=now_s):
            return _on_time(life, now_s)
        case SeatState.DEAD, Gone(now_s=now_s):
            retry_at_s = now_s + restart_delay_s(life.num_failures, life.limits)
            return _enter(life, SeatState.RESTARTING, now_s, retry_at_s=retry_at_s), []
        case SeatState.DEAD, Started() | StartFailed() | Heard() | Exited():
            return life, []  # it was under way when we gave up
        case _:
            raise InvalidTransition(f"{type(event).__name__} does not fit: {life.story()}")


def _on_time(life: SeatLife, now_s: float) -> tuple[SeatLife, list[SeatCommand]]:
    gap_s = now_s - life.ticked_s
    away_s = gap_s if gap_s > life.limits.max_gap_s else 0.0
    # While the supervisor was stopped it heard nobody. That is its own silence: everybody gets the time back.
    life = _replace(life, ticked_s=now_s, heard_s=min(life.heard_s + away_s, now_s))
    silent_s = now_s - life.heard_s
    match life.state:
        case SeatState.STARTING:
            life = _replace(life, since_s=min(life.since_s + away_s, now_s))
            if now_s - life.since_s >= life.limits.start_deadline_s:
                return _give_up(life, f"not started within {life.limits.start_deadline_s:g} s", now_s)
        case SeatState.RUNNING | SeatState.SUSPECT if silent_s >= life.limits.dead_s:
            return _give_up(life, f"silent for {silent_s:.1f} s", now_s)
        case SeatState.RUNNING if silent_s >= life.limits.suspect_s:
            return _enter(life, SeatState.SUSPECT, now_s), []
        case SeatState.RESTARTING if life.retry_at_s is not None and now_s >= life.retry_at_s:
            again = _enter(
                life,
                SeatState.STARTING,
                now_s,
                num_boots=life.num_boots + 1,
                started_s=None,
                retry_at_s=None,
                heard_s=now_s,
            )
            return again, [Launch()]
        case _:
            pass
    return life, []


def _give_up(life: SeatLife, reason: str, now_s: float) -> tuple[SeatLife, list[SeatCommand]]:
    was_stable = life.started_s is not None and now_s - life.started_s >= life.limits.stable_s
    failures = 1 if was_stable else life.num_failures + 1
    dead = _enter(life, SeatState.DEAD, now_s, num_failures=failures, reason=reason)
    # The router hears of it before the kill, which may take its time.
    return dead, [*([Announce()] if life.is_alive else []), Kill(reason)]


def _enter(life: SeatLife, state: SeatState, now_s: float, **changes: object) -> SeatLife:
    return _replace(life, state=state, since_s=now_s, **changes)


def _replace(life: SeatLife, **changes: object) -> SeatLife:
    return msgspec.structs.replace(life, **changes)
