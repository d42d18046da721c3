"""Known fault 8: running 0, waiting N for ever, each holder waiting for another's blocks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, expected_ids, fake_cluster, num_prompt_tokens, slow_config

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(120)]

B = 16
POOL_BLOCKS = 16
NUM_PROMPTS = 32
PROMPT_TOKENS = 5 * B
MAX_TOKENS = 3 * B
PROGRESS_S = 5.0
"""While somebody waits, a token comes at least so often."""
REFUSED_S = 1.0


def prompt(number: int) -> str:
    """Another text of PROMPT_TOKENS tokens for each number; the fake tokenizer has a token for every character."""
    text = f"{number:02} "
    return text.ljust(PROMPT_TOKENS - num_prompt_tokens(""), "x")


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "path"),
    [(1, 1, "tcp"), (1, 1, "shm"), (2, 2, "auto"), (0, 1, "auto"), (0, 2, "auto")],
)
async def test_many_more_prompts_than_fit_all_finish_and_one_that_never_fits_is_refused_at_once(
    num_prefill: int, num_decode: int, path: str, tmp_path: Path
) -> None:
    config = slow_config(
        step_s=0.005,
        token_s=0.0005,
        prefill={"num_workers": num_prefill, "num_blocks": POOL_BLOCKS},
        decode={"num_workers": num_decode, "num_blocks": POOL_BLOCKS},
        transfer={"path": path},
    )
    assert num_prompt_tokens(prompt(0)) == PROMPT_TOKENS
    async with fake_cluster(config, tmp_path) as fake:
        progress = Progress()
        streams = [
            asyncio.create_task(fake.stream(prompt(number), MAX_TOKENS, on_event=progress.moved))
            for number in range(NUM_PROMPTS)
        ]
        await asyncio.sleep(0.5)
        refused = await refuse_impossible(fake)
        outcomes = await asyncio.gather(*streams)
    for number, outcome in enumerate(outcomes):
        assert outcome.is_done, outcome
        assert outcome.token_ids == expected_ids(prompt(number), MAX_TOKENS, by_decode_alone=num_prefill == 0)
    assert progress.longest_gap_s < PROGRESS_S
    assert refused["code"] == "context_length_exceeded"


class Progress:
    """The longest time without any event of any stream."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self.longest_gap_s = 0.0

    def moved(self) -> None:
        now_s = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s


async def refuse_impossible(fake: FakeCluster) -> dict[str, Any]:
    """The error for a prompt that is larger than a pool; it comes at once, however long the queue is."""
    outcome = await fake.ask("y" * (POOL_BLOCKS * B + 1), 1)
    assert outcome.status == 400
    assert outcome.took_s < REFUSED_S
    assert outcome.error is not None
    return outcome.error
