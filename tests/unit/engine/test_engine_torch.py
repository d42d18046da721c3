"""The real engine on a tiny model: what it refuses, cancellation, and that nothing of an earlier request is read."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tiny_engine import TINY_MANIFEST, engine_over, tiny_decoder, tiny_engine, write_tiny_weights

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, ConfigError, EngineError, ModelError
from pd_core.request import GenerateRequest, SamplingParams, continue_request
from pd_engine.decoder import silu
from pd_engine.kernels import kernel_named, kernels
from pd_engine.loader import torch_layout
from pd_engine.pool import KvPool
from pd_engine.reference import generate_alone
from pd_engine.rotary import rotary_tables
from pd_engine.scratch import ScratchMemory
from pd_engine.steps import never
from pd_engine.torch_engine import TorchEngine
from pd_engine.weights import read_weights

GREEDY = SamplingParams()
PROMPT = [(13 * i + 5) % TINY_MANIFEST.vocab_size for i in range(37)]


@pytest.fixture(params=list(kernels()))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> TorchEngine:
    return tiny_engine(tmp_path, "float32", num_blocks=40, kernel=request.param)


def poison(engine: TorchEngine) -> None:
    """Every bit of the pool set: NaN wherever nothing has been written."""
    engine._pool.blocks.view(torch.int32).fill_(-1)


def pool_bytes(engine: TorchEngine) -> bytes:
    return engine._pool.blocks.numpy().tobytes()


def test_nothing_of_an_earlier_request_is_read_even_where_the_pool_is_full_of_nan(engine):
    clean = engine.logits([SequenceStep(PROMPT, 0, [4, 5, 6], GREEDY)])
    poison(engine)
    engine.step([SequenceStep(PROMPT[:20], 0, [7, 8, 9], None)], never)
    again = engine.logits([SequenceStep(PROMPT[20:], 20, [7, 8, 9], GREEDY)])
    assert np.array_equal(again, clean)


def test_only_the_blocks_of_the_step_are_touched(engine):
    poison(engine)
    before = engine._pool.blocks.view(torch.int32).clone()
    engine.step([SequenceStep(PROMPT, 0, [4, 5, 6], None)], never)
    changed = (engine._pool.blocks.view(torch.int32) != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [4, 5, 6]


def test_unused_slots_of_the_last_block_are_zero(engine):
    poison(engine)
    engine.step([SequenceStep(PROMPT[:18], 0, [4, 5], None)], never)
    last = engine._pool.blocks[5].view(-1, 16, TINY_MANIFEST.head_dim)
    assert last[:, :2].abs().amax() > 0
    assert torch.equal(last[:, 2:], torch.zeros_like(last[:, 2:]))


@pytest.mark.parametrize(
    "wrong",
    [
        SequenceStep([131], 0, [3], GREEDY),
        SequenceStep([-1], 0, [3], GREEDY),
        SequenceStep([1], 16, [3], GREEDY),
        SequenceStep([1], 0, [40], GREEDY),
        SequenceStep([1], 1200, list(range(76)), GREEDY),
    ],
)
def test_a_wrong_step_is_refused_before_anything_is_written(engine, wrong):
    before = pool_bytes(engine)
    with pytest.raises(EngineError):
        engine.step([SequenceStep([1, 2], 0, [0], GREEDY), wrong], never)
    assert pool_bytes(engine) == before


def test_a_step_without_sequences_is_refused(engine):
    with pytest.raises(EngineError, match="without sequences"):
        engine.step([], never)


def test_cancellation_is_asked_before_every_layer_and_the_step_can_be_run_again(engine):
    expected = engine.step([SequenceStep(PROMPT, 0, [0, 1, 2], GREEDY)], never)
    for stop_at in range(TINY_MANIFEST.num_layers):
        asked = iter(range(100))
        with pytest.raises(Cancelled, match=f"before layer {stop_at}"):
            engine.step([SequenceStep(PROMPT, 0, [4, 5, 6], GREEDY)], lambda n=stop_at, a=asked: next(a) == n)
        assert engine.step([SequenceStep(PROMPT, 0, [4, 5, 6], GREEDY)], never) == expected


def test_tokens_are_drawn_only_where_sampling_is_asked_for(engine):
    drawn = engine.step([SequenceStep(PROMPT, 0, [0, 1, 2], None), SequenceStep(PROMPT, 0, [4, 5, 6], GREEDY)], never)
    assert drawn[0] is None
    assert engine.step([SequenceStep(PROMPT, 0, [4, 5, 6], None)], never) == [None]
    assert drawn[1] == engine.logits([SequenceStep(PROMPT, 0, [4, 5, 6], None)])[0].argmax().item()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.2, top_p=0.95, top_k=40, seed=77)])
def test_a_continuation_goes_on_with_the_same_tokens(engine, sampling):
    request = GenerateRequest("r", PROMPT, 40, sampling)
    alone = generate_alone(engine, request, 16, range(8))
    assert len(set(alone)) > 5, "a stream that repeats itself would prove nothing"
    for emitted in (1, 10, 11, 12, 39):
        rest = generate_alone(engine, continue_request(request, alone[:emitted]), 32, range(10, 18))
        assert alone[:emitted] + rest == alone


def test_sampled_tokens_depend_on_the_seed(engine):
    one, two = (
        generate_alone(
            engine, GenerateRequest("r", PROMPT, 20, SamplingParams(temperature=1.0, seed=seed)), 64, range(8)
        )
        for seed in (1, 2)
    )
    assert one != two


def test_kernels_agree_with_each_other_up_to_rounding(tmp_path):
    long = [(17 * i + 3) % 131 for i in range(600)]
    rows = [
        tiny_engine(tmp_path, "float32", num_blocks=40, kernel=name).logits([SequenceStep(long, 0, range(38), None)])
        for name in kernels()
    ]
    assert len(rows) >= 2
    for row in rows[1:]:
        torch.testing.assert_close(row, rows[0], rtol=1e-4, atol=1e-4)


def test_an_unknown_kernel_is_refused_naming_those_there_are():
    with pytest.raises(ConfigError, match="sdpa, tiled"):
        kernel_named("flash")


def test_nan_weights_are_an_engine_error_and_not_a_token(tmp_path):
    path = tmp_path / "w.safetensors"
    write_tiny_weights(path, TINY_MANIFEST, seed=1)
    decoder = tiny_decoder(path, TINY_MANIFEST, "float32", "sdpa")
    decoder._weights.norm[3] = math.nan
    with pytest.raises(EngineError, match="position 37"):
        engine_over(decoder, "float32", 4, 1).step([SequenceStep(PROMPT, 0, [0, 1, 2], GREEDY)], never)


def test_silu_gives_an_element_the_same_bits_wherever_it_stands():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[torch.isfinite(every.float())]
    wide = torch.stack([finite, finite], dim=1)[:, 0]
    assert torch.equal(silu(finite), silu(wide)), "vector and leftover formulas of bfloat16"
    numbers = torch.randn(70_001, generator=torch.Generator().manual_seed(2)) * 6
    whole = silu(numbers)
    for begin, end in ((0, 1), (1, 18), (3, 40_000), (31, 70_001)):
        assert torch.equal(silu(numbers[begin:end].clone()), whole[begin:end])
    torch.testing.assert_close(whole, F.silu(numbers))


def test_rotary_tables_turn_by_position_times_frequency():
    cos, sin = rotary_tables(TINY_MANIFEST)
    assert cos.shape == sin.shape == (TINY_MANIFEST.context_tokens, TINY_MANIFEST.head_dim // 2)
    angle = 700 * 10_000.0 ** (-2 * 3 / TINY_MANIFEST.head_dim)
    assert cos[700, 3] == pytest.approx(math.cos(angle), abs=1e-4)
    assert sin[700, 3] == pytest.approx(math.sin(angle), abs=1e-4)


def test_a_pool_that_does_not_fit_the_layout_is_refused():
    layout = torch_layout(TINY_MANIFEST, "bfloat16")
    with pytest.raises(EngineError, match="the pool has"):
        KvPool(ScratchMemory(4, layout.block_bytes * 2), layout)


def test_missing_and_misshapen_weights_are_named(tmp_path):
    path = tmp_path / "w.safetensors"
    write_tiny_weights(path, TINY_MANIFEST, seed=1)
    deeper = msgspec.structs.replace(TINY_MANIFEST, num_layers=3)
    with pytest.raises(ModelError, match=r"lack model\.layers\.2\."):
        read_weights(path, deeper, torch.float32)
    wider = msgspec.structs.replace(TINY_MANIFEST, vocab_size=132)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is \[131, 48\]"):
        read_weights(path, wider, torch.float32)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot read the weights"):
        read_weights(path, TINY_MANIFEST, torch.float32)
