"""Whose prompt is computed in the next step, and how far. Pure; both roles go by it.

    tokens:  0 ....... chunk_tokens ....... 2 x chunk_tokens .... num_prompt
             |--- one chunk --|----- one chunk ------|- the rest -|

Chunks start at absolute multiples of `chunk_tokens`, or where a prompt was taken up, and end at the next multiple or
with the prompt. One step takes the chunks of several prompts, as long as they fit together: short prompts share it,
the full chunk of a long one goes alone.

Who has least left to compute goes first, so a long prompt does not stop short ones. Waiting counts: every second
since its last chunk makes a prompt `ageing_tokens_per_s` tokens shorter in this order, so a long prompt gets a chunk
after a bounded time however many short ones come, and those wait for that one chunk only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class PromptWork(msgspec.Struct, frozen=True):
    """A prompt as far as the choice looks at it.

    start:    position of the first token that is not computed
    end:      tokens of the whole prompt, > start
    waited_s: since its last chunk, or since it came
    """

    start: int
    end: int
    waited_s: float


class Share(msgspec.Struct, frozen=True):
    """Positions start .. end - 1 of prompt `index` (its place among those that were looked at) in the next step."""

    index: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def chunk_end(start: int, num_prompt: int, chunk_tokens: int) -> int:
    """Where the chunk that starts at `start` ends: at the next multiple of chunk_tokens, or with the prompt."""
    return min(num_prompt, (start // chunk_tokens + 1) * chunk_tokens)


def next_shares(
    prompts: Sequence[PromptWork], chunk_tokens: int, budget_tokens: int, ageing_tokens_per_s: float
) -> list[Share]:
    """The next step's chunks, first choice first; `prompts` are in order of arrival.

    budget_tokens: most tokens of all chunks together; the first choice waits too when its chunk is larger
    """
    shares: list[Share] = []
    left = budget_tokens
    for index in sorted(range(len(prompts)), key=lambda index: _rank(prompts[index], ageing_tokens_per_s)):
        prompt = prompts[index]
        end = chunk_end(prompt.start, prompt.end, chunk_tokens)
        if end - prompt.start <= left:
            shares.append(Share(index, prompt.start, end))
            left -= end - prompt.start
    return shares


def _rank(prompt: PromptWork, ageing_tokens_per_s: float) -> float:
    return prompt.end - prompt.start - ageing_tokens_per_s * prompt.waited_s
