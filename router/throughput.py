"""Tokens a second over the last moments. Pure: time comes in."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class Throughput:
    """Counts by whole seconds of the clock that it is given; what is older than WINDOW_S is forgotten."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._seconds: deque[tuple[int, int, int]] = deque()
        """(second, prompt tokens, generated tokens), none of them 0 together."""

    def add(self, num_prompt: int, num_generated: int, now_s: float) -> None:
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            _, prompt, generated = self._seconds.pop()
            num_prompt, num_generated = num_prompt + prompt, num_generated + generated
        self._seconds.append((second, num_prompt, num_generated))
        self._forget(now_s)

    def per_second(self, now_s: float) -> tuple[float, float]:
        """Prompt tokens and generated tokens, each by the second."""
        self._forget(now_s)
        watched_s = min(WINDOW_S, max(1.0, now_s - self._since_s))
        prompt = sum(second[1] for second in self._seconds)
        generated = sum(second[2] for second in self._seconds)
        return prompt / watched_s, generated / watched_s

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] < now_s - WINDOW_S:
            self._seconds.popleft()
