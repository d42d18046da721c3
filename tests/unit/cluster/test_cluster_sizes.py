"""Pools, threads and cores: a pure function of config, machine and model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.model_size import size_of
from cluster.sizes import (
    DEFAULT_CONTEXTS,
    WORKER_BYTES,
    Machine,
    ModelSize,
    check_gpus,
    fill_pool_sizes,
    plan_workers,
    share_cores,
    sharing_note,
)
from pd_core.config import parse_config
from pd_core.errors import ConfigError
from pd_core.layout import BLOCK_TOKENS
from pd_model.manifest import ModelManifest

GIB = 1 << 30
MODEL = ModelSize("small", block_bytes=360 << 10, weights_bytes=270 << 20, context_tokens=8192)


def machine(available_bytes: int = 64 * GIB, num_cores: int = 8) -> Machine:
    return Machine(cores=list(range(num_cores)), available_bytes=available_bytes)


def test_two_cores_are_one_for_each_worker_and_a_single_one_is_shared():
    assert share_cores([0, 1], 2) == [[0], [1]]
    assert share_cores([5], 2) == [[5], [5]]
    assert share_cores([2, 3, 5], 2) == [[2, 3], [5]]


@given(st.lists(st.integers(0, 500), unique=True, min_size=1), st.integers(1, 40))
def test_cores_are_shared_out_evenly_and_without_overlap(cores, num_workers):
    shares = share_cores(cores, num_workers)
    assert len(shares) == num_workers
    assert all(shares)
    if len(cores) >= num_workers:
        assert [core for share in shares for core in share] == cores
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {core for share in shares for core in share} == set(cores)


def test_default_pools_hold_four_full_contexts_where_memory_is_plenty():
    config = fill_pool_sizes(parse_config({}), machine(), MODEL)
    assert config.prefill.num_blocks == config.decode.num_blocks == DEFAULT_CONTEXTS * 8192 // BLOCK_TOKENS


def test_default_pools_take_half_of_what_is_left_where_memory_is_scarce():
    beside = 2 * (MODEL.weights_bytes + WORKER_BYTES)
    config = fill_pool_sizes(parse_config({}), machine(beside + 400 * MODEL.block_bytes), MODEL)
    assert config.prefill.num_blocks == config.decode.num_blocks == 100


@given(
    available=st.integers(0, 256 * GIB),
    num_prefill=st.integers(0, 8),
    num_decode=st.integers(1, 8),
    block_bytes=st.integers(1, 8 << 20),
    context=st.integers(16, 1 << 18),
)
def test_default_pools_always_fit_or_the_error_names_the_field(
    available, num_prefill, num_decode, block_bytes, context
):
    tree = {"prefill": {"num_workers": num_prefill}, "decode": {"num_workers": num_decode}}
    model = ModelSize("m", block_bytes, weights_bytes=100 << 20, context_tokens=context)
    try:
        config = fill_pool_sizes(parse_config(tree), machine(available), model)
    except ConfigError as error:
        assert error.param == ("prefill.num_blocks" if num_prefill else "decode.num_blocks")
        return
    assert config.decode.num_blocks
    assert bool(config.prefill.num_blocks) == (num_prefill > 0), "nobody needs a pool of no worker"
    pools = ((config.prefill.num_blocks or 0) * num_prefill + config.decode.num_blocks * num_decode) * block_bytes
    beside = (num_prefill + num_decode) * (model.weights_bytes + WORKER_BYTES)
    assert pools + beside <= available


def test_a_machine_without_memory_for_default_pools_is_told_so_with_numbers():
    with pytest.raises(
        ConfigError, match=r"prefill\.num_blocks: 1024 MiB of memory are free; 2 workers .* need"
    ) as raised:
        plan_workers(parse_config({}), machine(GIB), MODEL)
    assert raised.value.param == "prefill.num_blocks"


def test_a_pool_that_does_not_fit_is_refused_by_its_name_with_numbers():
    with pytest.raises(ConfigError, match=r"decode\.num_blocks: the pools .*decode\.num_blocks 100000") as raised:
        plan_workers(parse_config({"decode": {"num_blocks": 100_000}}), machine(8 * GIB), MODEL)
    assert raised.value.param == "decode.num_blocks"


def test_sizes_that_the_config_names_are_kept():
    tree = {"prefill": {"num_blocks": 16, "num_threads": 3}, "decode": {"num_blocks": 17}}
    prefill, decode = plan_workers(parse_config(tree), machine(), MODEL)
    assert (prefill.config.prefill.num_blocks, decode.config.decode.num_blocks) == (16, 17)
    assert prefill.config.prefill.num_threads == 3


def test_every_worker_has_a_name_a_role_and_as_many_threads_as_cores():
    plans = plan_workers(parse_config({"prefill": {"num_workers": 2}}), machine(num_cores=7), MODEL)
    assert [(plan.name, plan.role, plan.cores) for plan in plans] == [
        ("prefill-0", "prefill", [0, 1, 2]),
        ("prefill-1", "prefill", [3, 4]),
        ("decode-0", "decode", [5, 6]),
    ]
    assert [plan.config.prefill.num_threads for plan in plans[:2]] == [3, 2]
    assert plans[2].config.decode.num_threads == 2


def test_without_prefill_workers_decode_workers_have_the_machine_to_themselves():
    plans = plan_workers(parse_config({"prefill": {"num_workers": 0}}), machine(num_cores=3), MODEL)
    assert [(plan.name, plan.role, plan.cores) for plan in plans] == [("decode-0", "decode", [0, 1, 2])]
    assert plans[0].config.decode.num_threads == 3
    beside = MODEL.weights_bytes + WORKER_BYTES
    alone = fill_pool_sizes(
        parse_config({"prefill": {"num_workers": 0}}), machine(beside + 400 * MODEL.block_bytes), MODEL
    )
    assert (alone.prefill.num_blocks, alone.decode.num_blocks) == (None, 200)


def test_a_pool_of_prefill_workers_that_there_are_not_takes_no_memory():
    tree = {"prefill": {"num_workers": 0, "num_blocks": 1 << 24}, "decode": {"num_blocks": 64}}
    assert len(plan_workers(parse_config(tree), machine(4 * GIB), MODEL)) == 1


def test_an_odd_number_of_cores_is_shared_out_to_both_roles_one_by_one():
    tree = {"prefill": {"num_workers": 2}, "decode": {"num_workers": 2}}
    plans = plan_workers(parse_config(tree), machine(num_cores=5), MODEL)
    assert [plan.cores for plan in plans] == [[0, 1], [2], [3], [4]]
    threads = [getattr(plan.config, plan.role).num_threads for plan in plans]
    assert threads == [2, 1, 1, 1]


def test_more_workers_than_cores_share_them_and_that_is_said():
    tree = {"prefill": {"num_workers": 2}, "decode": {"num_workers": 2}}
    plans = plan_workers(parse_config(tree), machine(num_cores=2), MODEL)
    assert [plan.cores for plan in plans] == [[0], [1], [0], [1]], "each core has one of both roles"
    assert sharing_note([0, 1], 4) == "4 workers share 2 cores: they compute in turns"
    assert sharing_note([7], 2) == "2 workers share 1 core: they compute in turns"
    assert sharing_note([0, 1], 2) is None


def test_on_cuda_each_worker_has_a_gpu_of_its_own_and_on_the_cpu_none():
    tree = {"model": {"device": "cuda"}, "decode": {"num_workers": 2}}
    assert [plan.num_gpus for plan in plan_workers(parse_config(tree), machine(), MODEL)] == [1, 1, 1]
    assert [plan.num_gpus for plan in plan_workers(parse_config({}), machine(), MODEL)] == [0, 0]


@pytest.mark.parametrize("num_visible", [0, 1])
def test_fewer_gpus_than_workers_are_named_with_both_numbers(num_visible):
    config = parse_config({"model": {"device": "cuda"}})
    check_gpus(config, 2)
    check_gpus(parse_config({}), 0)
    with pytest.raises(ConfigError, match=f"2 workers need a GPU each, and {num_visible} can be seen") as raised:
        check_gpus(config, num_visible)
    assert raised.value.param == "model.device"


def test_a_block_of_the_default_model_takes_360_kib_in_bfloat16_and_twice_that_in_float32():
    manifest = ModelManifest(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        context_tokens=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tied_embeddings=True,
        eos_token_ids=[2],
        bos_token_id=1,
    )
    half, full = size_of("m", manifest, "bfloat16"), size_of("m", manifest, "float32")
    assert half.block_bytes == 360 << 10
    assert full.block_bytes == 720 << 10
    num_weights, head, rotary_bytes = 134_515_008, 49152 * 576, 2 * 8192 * 64 * 4
    assert half.weights_bytes == 2 * (num_weights + head) + rotary_bytes
    assert full.weights_bytes == 4 * (num_weights + head) + rotary_bytes
