"""How long one step of a request may take, whatever the request's own deadline. Pure: time comes in.

A sequence that was preempted may have to wait for older ones, so for it time counts from the last moment at which its
worker was heard to get on. It cannot wait for ever: a worker that stands still is late, and so is, in the end, the
whole request, whose own deadline holds in every state.
"""

from __future__ import annotations

import msgspec


class StepDeadlines(msgspec.Struct, frozen=True):
    """How long one step may take.

    reserve_s:                  from the placement to the ticket, or until decode has taken the prompt
    first_token_s, prompt_token_s: from then to the first token: a base, and for every prompt token
    next_token_s:               from one token to the next, the handoff's commit included
    linger_s:                   how long a leg whose work is done may take to say so, before it is cancelled
    """

    reserve_s: float = 5.0
    first_token_s: float = 60.0
    prompt_token_s: float = 0.1
    next_token_s: float = 60.0
    linger_s: float = 1.0


class StepClock:
    """Told what has happened; says whether the step that the request is in is late."""

    def __init__(self, steps: StepDeadlines) -> None:
        self._steps = steps
        self._ends_s: float | None = None
        self._preempted_s: float | None = None

    @property
    def is_preempted(self) -> bool:
        """Preempted, and no token has come since."""
        return self._preempted_s is not None

    def placed(self, now_s: float) -> None:
        self._ends_s = now_s + self._steps.reserve_s

    def taken(self, num_prompt: int, now_s: float) -> None:
        """There is a ticket, or decode computes the prompt."""
        self._ends_s = now_s + self._steps.first_token_s + self._steps.prompt_token_s * num_prompt

    def token_came(self, now_s: float) -> bool:
        """Whether this token ends a preemption."""
        was_preempted = self._preempted_s is not None
        self._ends_s = now_s + self._steps.next_token_s
        self._preempted_s = None
        return was_preempted

    def preempted(self, now_s: float) -> None:
        self._preempted_s = now_s

    def stop(self) -> None:
        """No step is under way."""
        self._ends_s = self._preempted_s = None

    def is_late(self, now_s: float, progress_s: float) -> bool:
        """progress_s: when the worker that may have preempted it was last heard to get on."""
        if self._ends_s is None or now_s < self._ends_s:
            return False
        if self._preempted_s is None:
            return True
        return now_s - max(progress_s, self._preempted_s) >= self._steps.next_token_s
