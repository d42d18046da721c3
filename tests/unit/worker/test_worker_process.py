"""From the config to engine, pool and process."""

from __future__ import annotations

import json
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from pd_core.config import Config, DecodeConfig, FakeEngineConfig, ModelConfig, PrefillConfig
from pd_core.engine import SequenceStep
from pd_core.errors import ConfigError
from pd_core.request import SamplingParams
from pd_worker.build import Role, build_engine, ring_blocks
from pd_worker.process import COMPUTING_NICE, LOWEST_NICE, compute_on, log_to

FAKE = Config(
    model=ModelConfig(path="fake", fake=FakeEngineConfig(context_tokens=128)),
    prefill=PrefillConfig(num_blocks=4),
    decode=DecodeConfig(num_blocks=6),
)


@pytest.mark.parametrize(("role", "num_blocks", "token"), [("prefill", 4, 12), ("decode", 6, 18)])
def test_the_fake_engines_of_the_two_roles_have_different_weights(
    role: Role, num_blocks: int, token: int, tmp_path: Path
) -> None:
    engine, memory = build_engine(FAKE, role, 1, tmp_path)
    assert memory.num_blocks == num_blocks
    assert engine.context_tokens == 128
    assert engine.step([SequenceStep([1, 2, 3], 0, [0], SamplingParams())], lambda: False) == [token]
    memory.close()


def test_a_pool_whose_size_was_not_chosen_is_a_config_error(tmp_path: Path) -> None:
    config = msgspec.structs.replace(FAKE, decode=DecodeConfig(num_blocks=None))
    with pytest.raises(ConfigError, match="has not been chosen") as caught:
        build_engine(config, "decode", 1, tmp_path)
    assert caught.value.param == "decode.num_blocks"


def test_a_ring_holds_a_few_chunks_and_never_more_than_the_pool() -> None:
    assert [ring_blocks(chunk_tokens, 1000) for chunk_tokens in (16, 256, 512)] == [4, 64, 128]
    assert ring_blocks(256, 5) == 5


def test_a_thread_that_computes_and_its_children_are_tied_to_its_cores_and_nobody_else() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)

    def cores_of_a_child() -> set[int]:
        with ThreadPoolExecutor(1) as child:
            return child.submit(os.sched_getaffinity, 0).result()

    with ThreadPoolExecutor(1, initializer=compute_on, initargs=([one],)) as computing:
        assert computing.submit(cores_of_a_child).result() == {one}
        with pytest.raises(OSError, match="Invalid argument"):
            computing.submit(compute_on, [100_000]).result()
    with ThreadPoolExecutor(1, initializer=compute_on, initargs=([],)) as computing:
        assert computing.submit(cores_of_a_child).result() == before
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_computes_lets_others_first_takes_its_children_along_and_nobody_else() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def nice_of_a_child() -> int:
        with ThreadPoolExecutor(1) as child:
            return child.submit(os.getpriority, os.PRIO_PROCESS, 0).result()

    with ThreadPoolExecutor(1, initializer=compute_on, initargs=([],)) as computing:
        assert computing.submit(nice_of_a_child).result() == min(own + COMPUTING_NICE, LOWEST_NICE)
        for _ in range(3):
            computing.submit(compute_on, []).result()  # the lowest is no error
        assert computing.submit(nice_of_a_child).result() == LOWEST_NICE
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_log_lines_go_to_a_private_file_as_json_with_the_request_id(tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        log_to(tmp_path / "worker.jsonl")
        logging.getLogger("worker").info("committed", extra={"request_id": "r1", "num_blocks": 3})
        for handler in root.handlers:
            handler.close()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    [line] = (tmp_path / "worker.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["message"], entry["request_id"], entry["num_blocks"], entry["level"]) == (
        "committed",
        "r1",
        3,
        "info",
    )
    assert stat.S_IMODE((tmp_path / "worker.jsonl").stat().st_mode) == 0o600
