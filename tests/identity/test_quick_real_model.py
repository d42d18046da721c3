"""The shortest proof that the product works: `kvrelay up` with the embedded model, right answers, a clean end."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conversations import Client, References
from kvrelay_process import KVRELAY
from questions import load_questions

from pd_model.folder import ModelFolder, default_cache_dir

NUM_QUESTIONS = 2


def status_of(url: str, *flags: str) -> str:
    """What `kvrelay status` prints; it must succeed."""
    command = [KVRELAY, "status", "--url", url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True).stdout


@pytest.mark.timeout(180)
async def test_kvrelay_up_serves_the_tokens_of_one_process_shows_itself_and_ends(
    kvrelay_up: Any, model_folder: ModelFolder, references: References, traces: Path | None
) -> None:
    run = kvrelay_up(cache=default_cache_dir().parent, model={"path": None})
    url = run.wait_ready()["url"]
    questions = load_questions(traces, NUM_QUESTIONS)
    turns = await Client(url, model_folder, seed=7, spread_s=1.0, max_tokens=32).hold_all(questions)
    assert len(turns) == 4 * NUM_QUESTIONS

    shown = await asyncio.to_thread(status_of, url)
    assert f"kvrelay on {url} is ready" in shown
    assert "prefill-0" in shown and "decode-0" in shown
    assert json.loads(await asyncio.to_thread(status_of, url, "--json"))["ready"] is True

    run.end_by_ctrl_c()
    references.check(turns, "bfloat16", "auto")
