"""Devices: what is refused without one, and what one has to do where there is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from family_models import CASES, make_model, prompt, their_logits, write_folder

from pd_core.config import parse_config
from pd_core.engine import SequenceStep
from pd_core.errors import ConfigError, EngineError
from pd_engine.device import CPU, find_device
from pd_engine.device_copies import CudaCopies, copies_for
from pd_engine.engine import ModelEngine
from pd_engine.invariance import InvarianceProof
from pd_engine.loader import EnginePlan, load_engine, load_on_device, native_spec, plan_engine, promised
from pd_engine.pool import DeviceKvPool
from pd_engine.scratch import ScratchMemory
from pd_model.folder import ModelFolder, default_cache_dir, open_model
from pd_worker.memory import PoolMemory

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
PROMPT = prompt(100)


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return open_model(str(write_folder(tmp_path / "m", make_model(CASES["qwen2"]))), tmp_path / "cache")


def test_the_cpu_is_always_there() -> None:
    assert find_device("cpu") == CPU


def test_a_torch_without_cuda_is_named(folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=f"torch {torch.__version__.replace('+', '.')} is built without CUDA") as no:
        plan_engine(folder, "float32", tmp_path, device="cuda")
    assert no.value.param == "model.device"


def test_a_process_that_sees_no_device_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no CUDA device") as no:
        find_device("cuda")
    assert no.value.param == "model.device"


@pytest.mark.parametrize(
    ("kernel", "device", "weights", "param"),
    [
        ("native", "cuda", "dtype", "model.device"),
        ("auto", "cuda", "int8", "model.device"),
        ("sdpa", "cpu", "int8", "model.weights"),
    ],
)
def test_what_cannot_be_had_together_is_refused_by_name(
    folder: ModelFolder, tmp_path: Path, kernel: str, device: str, weights: str, param: str
) -> None:
    with pytest.raises(ConfigError) as no:
        plan_engine(folder, "float32", tmp_path, kernel, device, weights)  # type: ignore[arg-type]
    assert no.value.param == param
    with pytest.raises(ConfigError):
        parse_config({"model": {"kernels": kernel, "device": device, "weights": weights}})


def test_int8_weights_are_asked_of_the_kernels_and_shown_in_the_numerics(folder: ModelFolder) -> None:
    cache_dir = default_cache_dir()
    plain, small = (plan_engine(folder, "bfloat16", cache_dir, weights=form) for form in ("dtype", "int8"))
    assert (plain.weights, small.weights) == ("dtype", "int8")
    assert "int8" in small.fingerprint.numerics
    assert "int8" not in plain.fingerprint.numerics
    assert native_spec(folder.manifest, "bfloat16", small.weights).weights == "int8"


def test_a_trial_without_a_difference_proves_nothing_of_a_cuda_device() -> None:
    clean = InvarianceProof("n", "w", [1], None)
    assert promised(clean, CPU).report()["invariance"] == "bit-exact"
    on_cuda = promised(clean, torch.device("cuda:0"))
    assert on_cuda.report()["invariance"].startswith("same distribution only: no difference was found on cuda:0, but")
    seen = msgspec.structs.replace(clean, failure="KV of chunks differs")
    assert promised(seen, torch.device("cuda:0")) == seen


def test_an_engine_is_loaded_where_it_was_planned(folder: ModelFolder, tmp_path: Path) -> None:
    plan = plan_engine(folder, "float32", tmp_path, "sdpa")
    elsewhere = dataclasses.replace(plan, device=torch.device("meta"))
    memory = ScratchMemory(2, plan.layout.block_bytes)
    with pytest.raises(EngineError, match="an engine on meta has no pool in memory"):
        load_engine(elsewhere, memory, num_threads=1)
    native = plan_engine(folder, "float32", default_cache_dir())
    with pytest.raises(EngineError, match="the native kernels have their pool in memory, not on cpu"):
        load_on_device(native, 2, num_threads=1)


def test_an_engine_over_a_pool_on_a_device_gives_the_bits_of_one_in_memory(folder: ModelFolder, tmp_path: Path) -> None:
    plan = plan_engine(folder, "float32", tmp_path, "sdpa")
    direct = load_engine(plan, ScratchMemory(16, plan.layout.block_bytes), num_threads=1)
    engine, pool = load_on_device(plan, 16, num_threads=1)
    assert isinstance(direct, ModelEngine)
    assert isinstance(engine, ModelEngine)
    steps = [SequenceStep(PROMPT, 0, range(7), None)]
    assert engine.logits(steps).tobytes() == direct.logits(steps).tobytes()
    assert (pool.num_blocks, pool.block_bytes) == (16, plan.layout.block_bytes)
    assert engine.invariance_report()["invariance"] == "bit-exact"


def on_cuda(folder: ModelFolder, tmp_path: Path, kernel: str = "auto") -> tuple[EnginePlan, ModelEngine, DeviceKvPool]:
    plan = plan_engine(folder, "float32", tmp_path, kernel, "cuda")
    engine, pool = load_on_device(plan, 16, num_threads=1)
    assert isinstance(engine, ModelEngine)
    return plan, engine, pool


@needs_cuda
@pytest.mark.parametrize("name", ["llama with biases", "qwen2 tied yarn", "qwen3"])
@pytest.mark.parametrize("kernel", ["sdpa", "tiled"])
def test_logits_on_cuda_are_those_of_transformers(tmp_path: Path, name: str, kernel: str) -> None:
    model = make_model(CASES[name])
    opened = open_model(str(write_folder(tmp_path / "m", model)), tmp_path / "cache")
    _, engine, _ = on_cuda(opened, tmp_path, kernel)
    engine.logits([SequenceStep(PROMPT[:64], 0, range(7), None)])
    (found,) = engine.logits([SequenceStep(PROMPT[64:], 64, range(7), None)])
    np.testing.assert_allclose(found, their_logits(model, PROMPT)[-1].numpy(), rtol=1e-3, atol=1e-3)


@needs_cuda
def test_blocks_go_from_one_cuda_pool_to_another_through_pinned_slots(folder: ModelFolder, tmp_path: Path) -> None:
    plan, engine, pool = on_cuda(folder, tmp_path)
    expected = engine.logits([SequenceStep(PROMPT, 0, range(7), None)])
    memory = PoolMemory(7, plan.layout.block_bytes)  # as a worker's ring: shared, sealed, then pinned
    copies = copies_for(pool, memory)
    assert isinstance(copies, CudaCopies)
    assert torch.frombuffer(memory.buffer, dtype=torch.uint8).is_pinned()
    copies.start_out(range(7), range(7)).wait()
    _, other, target = on_cuda(folder, tmp_path)
    slots = ScratchMemory(7, plan.layout.block_bytes)
    slots.buffer[:] = memory.buffer
    into = copies_for(target, slots)
    into.start_in(range(7), range(7)).wait()
    assert torch.equal(target.blocks[:7], pool.blocks[:7])
    found = other.logits([SequenceStep(PROMPT[-1:], len(PROMPT) - 1, range(7), None)])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    copies.close()
    into.close()
    memory.close()
    assert "cuda" in plan.fingerprint.numerics
    assert engine.invariance_report()["invariance"].startswith("same distribution only")
    assert plan.why is None
