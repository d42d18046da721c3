"""Every family, with every setting that is served, computes what transformers does, and row by row the same bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from family_gguf import write_family_gguf
from family_models import CASES, make_model, prompt, their_logits, write_folder
from numpy.typing import NDArray

from pd_core.engine import SequenceStep
from pd_core.layout import DType, blocks_for
from pd_engine.engine import ModelEngine
from pd_engine.loader import load_engine, plan_engine
from pd_engine.native.build import build
from pd_engine.scratch import ScratchMemory
from pd_engine.steps import never
from pd_model.folder import ModelFolder, default_cache_dir, open_model

TOLERANCE = 1e-4
PROMPT = prompt(163)
ENDS = (1, 16, 17, 40, 100, 163)
"""Where logits are compared: chunks of many sizes end there, on and beside the edges of blocks."""
KERNELS = ("sdpa", "tiled", "native")


class Families:
    """Each case's folder, made once: as transformers has it, and opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.cache_dir = folder / "cache"
        # everything of the tests in a folder of their own, but for the compiled kernels
        self.cache_dir.mkdir()
        compiled = build(default_cache_dir()).parent.parent
        (self.cache_dir / compiled.name).symlink_to(compiled, target_is_directory=True)

    @functools.cache  # noqa: B019 - lives as long as the tests
    def made(self, name: str) -> tuple[ModelFolder, NDArray[np.float32]]:
        model = make_model(CASES[name])
        source = write_folder(self._folder / name, model)
        return open_model(str(source), self.cache_dir), their_logits(model, PROMPT).numpy()

    def engine(self, name: str, kernel: str, dtype: DType, num_blocks: int = 24) -> ModelEngine:
        return self.engine_and_memory(name, kernel, dtype, num_blocks)[0]

    def engine_and_memory(
        self, name: str, kernel: str, dtype: DType, num_blocks: int
    ) -> tuple[ModelEngine, ScratchMemory]:
        plan = plan_engine(self.made(name)[0], dtype, self.cache_dir, kernel)
        memory = ScratchMemory(num_blocks, plan.layout.block_bytes)
        engine = load_engine(plan, memory, num_threads=1)
        assert isinstance(engine, ModelEngine)
        return engine, memory


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


def logits_at(engine: ModelEngine, ends: Sequence[int], first_block: int = 0) -> NDArray[np.float32]:
    """Logits after each of `ends` tokens of PROMPT, one chunk up to each: [ends, vocab]."""
    table = list(range(first_block, first_block + blocks_for(len(PROMPT))))
    rows, start = [], 0
    for end in ends:
        rows.append(engine.logits([SequenceStep(PROMPT[start:end], start, table, None)]))
        start = end
    return np.concatenate(rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", list(CASES))
def test_logits_are_those_of_transformers(families: Families, name: str, kernel: str) -> None:
    expected = families.made(name)[1][[end - 1 for end in ENDS]]
    assert np.abs(expected).max() > 1, "logits of no size would agree whatever we do"
    found = logits_at(families.engine(name, kernel, "float32"), ENDS)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama llama3 rope", "qwen2 tied yarn", "qwen3 tied with biases"])
def test_a_gguf_file_of_the_model_gives_the_same_logits(families: Families, tmp_path: Path, name: str) -> None:
    """Llama 3's rope is said in other words there, and q and k of Llamas lie in another order."""
    source = write_family_gguf(tmp_path / "model.gguf", make_model(CASES[name]))
    plan = plan_engine(open_model(str(source), families.cache_dir), "float32", families.cache_dir, "sdpa")
    engine = load_engine(plan, ScratchMemory(24, plan.layout.block_bytes), num_threads=1)
    assert isinstance(engine, ModelEngine)
    found = logits_at(engine, [100, 163])
    np.testing.assert_allclose(found, families.made(name)[1][[99, 162]], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama linear rope", "llama llama3 rope", "llama yarn", "llama yarn with mscale"])
def test_each_kind_of_rope_shows_in_the_logits(families: Families, name: str) -> None:
    """Else the comparison above would prove nothing of it."""
    plain, scaled = (logits_at(families.engine(which, "sdpa", "float32"), [163]) for which in ("llama", name))
    assert np.abs(scaled - plain).max() > 0.1


@pytest.mark.parametrize("kernel", ["sdpa", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama with biases", "qwen2 tied yarn", "qwen3 tied with biases"])
def test_a_row_has_the_same_bits_in_chunks_of_any_size_and_beside_others(
    families: Families, name: str, kernel: str, dtype: DType
) -> None:
    engine, memory = families.engine_and_memory(name, kernel, dtype, num_blocks=48)
    num_blocks = blocks_for(len(PROMPT))
    (whole,) = logits_at(engine, [len(PROMPT)])
    kv = pool_bytes(memory, range(num_blocks))
    for chunk in (1, 16, 37):
        ends = [*range(chunk, len(PROMPT), chunk), len(PROMPT)]
        again = logits_at(engine, ends, first_block=num_blocks)[-1]
        assert again.tobytes() == whole.tobytes()
        assert pool_bytes(memory, range(num_blocks, 2 * num_blocks)) == kv
    beside = [SequenceStep(prompt(5 + i, seed=i), 0, [2 * num_blocks + i], None) for i in range(6)]
    engine.step([SequenceStep(PROMPT[:160], 0, range(num_blocks), None), *beside[:3]], never)
    last = SequenceStep(PROMPT[160:], 160, range(num_blocks), None)
    assert engine.logits([*beside, last])[-1].tobytes() == whole.tobytes()
    assert pool_bytes(memory, range(num_blocks)) == kv


def test_bfloat16_is_near_float32(families: Families) -> None:
    for name in ("llama with biases", "qwen2", "qwen3"):
        expected = families.made(name)[1][-1]
        for kernel in KERNELS:
            (found,) = logits_at(families.engine(name, kernel, "bfloat16"), [len(PROMPT)])
            assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


def pool_bytes(memory: ScratchMemory, block_ids: range) -> list[bytes]:
    return [bytes(memory.block(block_id)) for block_id in block_ids]
