"""Prompts of random token ids: nobody can have cached one, and the same seed gives the same. Pure."""

from __future__ import annotations

import random


class PromptMaker:
    """Never gives the same prompt twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def make(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]
