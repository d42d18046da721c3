"""Devices: what is refused without one, and what one has to do where there is one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from family_models import CASES, make_model, prompt, their_logits, write_folder

from pd_core.config import parse_config
from pd_core.engine import SequenceStep
from pd_core.errors import ConfigError
from pd_engine.device import CPU, find_device
from pd_engine.engine import ModelEngine
from pd_engine.invariance import InvarianceProof
from pd_engine.loader import EnginePlan, load_engine, native_spec, plan_engine, promised
from pd_engine.scratch import ScratchMemory
from pd_model.folder import ModelFolder, default_cache_dir, open_model

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


def on_cuda(folder: ModelFolder, tmp_path: Path, kernel: str = "auto") -> tuple[EnginePlan, ModelEngine, ScratchMemory]:
    plan = plan_engine(folder, "float32", tmp_path, kernel, "cuda")
    memory = ScratchMemory(16, plan.layout.block_bytes)
    engine = load_engine(plan, memory, num_threads=1)
    assert isinstance(engine, ModelEngine)
    return plan, engine, memory


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
def test_blocks_go_from_one_cuda_pool_to_another_through_memory(folder: ModelFolder, tmp_path: Path) -> None:
    plan, engine, memory = on_cuda(folder, tmp_path)
    expected = engine.logits([SequenceStep(PROMPT, 0, range(7), None)])
    assert not any(memory.buffer)
    engine.publish(range(7))
    _, other, target = on_cuda(folder, tmp_path)
    target.buffer[:] = memory.buffer
    other.adopt(range(7))
    found = other.logits([SequenceStep(PROMPT[-1:], len(PROMPT) - 1, range(7), None)])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    other.publish(range(7))
    assert bytes(target.block(0)) == bytes(memory.block(0))
    assert "cuda" in plan.fingerprint.numerics
    assert engine.invariance_report()["invariance"].startswith("same distribution only")
    assert plan.why is None
