"""The engine's check of itself: it holds for our kernels, sees a kernel that is not invariant, and is made once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_engine import TINY_MANIFEST, tiny_decoder, write_tiny_weights
from torch import Tensor

from pd_core.errors import ConfigError
from pd_core.layout import check_pairing
from pd_engine.attention import AttentionPlan, RowSpan
from pd_engine.attention_sdpa import SdpaKernel
from pd_engine.decoder import Decoder
from pd_engine.invariance import find_variance, proven
from pd_engine.kernels import kernels
from pd_engine.loader import load_engine, plan_engine, torch_layout
from pd_engine.native.build import NativeUnavailable
from pd_engine.pool import KvPool
from pd_engine.scratch import ScratchMemory
from pd_engine.shallow_decoder import ShallowDecoder
from pd_model.folder import ModelFolder

LAYOUT = torch_layout(TINY_MANIFEST, "float32")


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    path = tmp_path / "model.safetensors"
    write_tiny_weights(path, TINY_MANIFEST, seed=1)
    return ModelFolder(
        name="tiny",
        manifest=TINY_MANIFEST,
        weights_path=path,
        weights_digest="weights-1",
        settings_digest="settings-1",
        tokenizer_path=tmp_path / "tokenizer.json",
        tokenizer_digest="tokenizer-1",
        chat_template=None,
        template_tokens={},
    )


class _BatchSensitivePlan:
    """Attention whose last bits depend on how many rows there are: what plain libraries do."""

    def __init__(self, plan: AttentionPlan, num_rows: int) -> None:
        self._plan = plan
        self._num_rows = num_rows

    def attend(self, queries: Tensor, block_rows: Tensor) -> Tensor:
        return self._plan.attend(queries, block_rows) * (1.0 + 1e-6 * (self._num_rows % 7))


class BatchSensitiveKernel(SdpaKernel):
    name = "batch-sensitive"

    def plan(self, spans: Sequence[RowSpan], num_rows: int, num_heads: int, pool: KvPool) -> AttentionPlan:
        return _BatchSensitivePlan(super().plan(spans, num_rows, num_heads, pool), num_rows)


@pytest.mark.parametrize("kernel", list(kernels()))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_passes_and_the_number_of_threads_is_left_as_it_was(folder, kernel, dtype):
    before = torch.get_num_threads()
    decoder = tiny_decoder(folder.weights_path, TINY_MANIFEST, dtype, kernel)
    assert find_variance(ShallowDecoder(decoder, torch_layout(TINY_MANIFEST, dtype)), [1, 2]) is None
    assert torch.get_num_threads() == before


def test_a_kernel_that_is_not_invariant_is_seen_and_the_promise_openly_withdrawn(folder, tmp_path):
    good = tiny_decoder(folder.weights_path, TINY_MANIFEST, "float32", "sdpa")
    bad = Decoder(TINY_MANIFEST, good._weights, BatchSensitiveKernel())
    proof = proven(lambda: ShallowDecoder(bad, LAYOUT), "numerics of the bad one", "w", 2, tmp_path)
    assert proof.failure is not None
    report = proof.report()
    assert report["invariance"].startswith("same distribution only: KV of chunks")
    assert report["numerics"] == "numerics of the bad one"


def test_a_proof_is_made_once_and_then_looked_up(folder, tmp_path):
    decoder = tiny_decoder(folder.weights_path, TINY_MANIFEST, "float32", "sdpa")
    first = proven(lambda: ShallowDecoder(decoder, LAYOUT), "n", "w", 2, tmp_path)
    (path,) = (tmp_path / "invariance").iterdir()
    marked = msgspec.structs.replace(first, failure="read from the file")
    path.write_bytes(msgspec.json.encode(marked))
    assert proven(lambda: ShallowDecoder(decoder, LAYOUT), "n", "w", 2, tmp_path) == marked
    for numerics, weights, threads in (("m", "w", 2), ("n", "v", 2), ("n", "w", 1)):
        other = proven(lambda: ShallowDecoder(decoder, LAYOUT), numerics, weights, threads, tmp_path)
        assert other.failure is None, "another numerics id, weights or threads"


@pytest.mark.parametrize("garbage", [b"", b"{", b'{"numerics": 3}', b"\xff" * 40])
def test_a_broken_proof_file_is_a_proof_made_again(folder, tmp_path, garbage):
    decoder = tiny_decoder(folder.weights_path, TINY_MANIFEST, "float32", "sdpa")
    first = proven(lambda: ShallowDecoder(decoder, LAYOUT), "n", "w", 1, tmp_path)
    (path,) = (tmp_path / "invariance").iterdir()
    path.write_bytes(garbage)
    assert proven(lambda: ShallowDecoder(decoder, LAYOUT), "n", "w", 1, tmp_path) == first
    assert msgspec.json.decode(path.read_bytes())["failure"] is None
    assert list((tmp_path / "invariance").iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize("context_tokens", [1, 5, 70])
def test_a_model_with_a_short_context_is_checked_as_far_as_it_goes(folder, context_tokens):
    manifest = msgspec.structs.replace(TINY_MANIFEST, context_tokens=context_tokens)
    decoder = tiny_decoder(folder.weights_path, manifest, "float32", "sdpa")
    assert find_variance(ShallowDecoder(decoder, LAYOUT), [1]) is None


def test_a_loaded_engine_has_the_fingerprint_that_was_announced(folder, tmp_path):
    plan = plan_engine(folder, "bfloat16", tmp_path, "sdpa")
    engine = load_engine(plan, ScratchMemory(4, plan.layout.block_bytes), num_threads=1)
    check_pairing(engine.fingerprint, plan.fingerprint)
    assert engine.fingerprint.weights == "weights-1"
    assert engine.fingerprint.layout == plan.layout
    assert engine.invariance_report()["invariance"] == "bit-exact"
    assert engine.vocab_size == 131
    assert engine.context_tokens == 1200


def test_a_model_that_the_native_kernels_refuse_runs_on_torch_and_says_so(folder, tmp_path):
    plan = plan_engine(folder, "float32", tmp_path)
    assert plan.kernel == "sdpa"
    engine = load_engine(plan, ScratchMemory(4, plan.layout.block_bytes), num_threads=1)
    assert "multiple of 16" in engine.invariance_report()["torch_because"]
    with pytest.raises(NativeUnavailable, match="multiple of 16"):
        plan_engine(folder, "float32", tmp_path, "native")


def test_unknown_kernels_are_refused_by_the_name_of_the_setting(folder, tmp_path):
    with pytest.raises(ConfigError, match="auto, native, sdpa, tiled") as caught:
        plan_engine(folder, "float32", tmp_path, "fastest")
    assert caught.value.param == "model.kernels"


def test_kernel_and_dtype_are_part_of_the_numerics(folder, tmp_path):
    ids = {
        plan_engine(folder, dtype, tmp_path, kernel).fingerprint.numerics
        for dtype in ("float32", "bfloat16")
        for kernel in kernels()
    }
    assert len(ids) == 2 * len(kernels())
