"""The transfer bench: what is compared with what, what becomes of ways that fail, and real processes."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from typing import Any

import pytest

from load_tests.transfer_bench import NUM_TIMES, OpenWays
from load_tests.transfer_checks import checks_of
from load_tests.transfer_messages import Done, Inspect, Open, Opened
from load_tests.transfer_pair import TransferPair, transfer_pair
from load_tests.transfer_ways import CALL, MANY, SMALL, TRANSFER_SHAPES, WAYS, Shape, Way, layout_of, way_named
from pd_core.errors import DeadlineExceeded, EngineError

FEW = Shape("few", 3, 8192)
CORES = sorted(os.sched_getaffinity(0))


def test_the_promised_shares_are_those_of_each_path_to_its_own_bare_pair():
    promised = {way.name: (way.bare, way.target) for way in WAYS if way.target is not None}
    assert promised == {
        "shm_no_digests": ("bare_shm", 0.9),
        "tcp_no_digests": ("bare_socket", 0.9),
        "ucx_no_digests": ("bare_ucxx", 0.9),
        "shm": ("bare_shm", 0.6),
        "tcp": ("bare_socket", 0.75),
        "ucx": ("bare_ucxx", 0.9),
    }


def test_a_way_and_its_bare_pair_share_processes_and_shapes():
    for way in WAYS:
        if way.bare is not None:
            bare = way_named(way.bare)
            assert (bare.family, bare.shapes, bare.path) == (way.family, way.shapes, None)


def test_the_shapes_are_those_that_were_promised():
    assert [shape.num_bytes for shape in TRANSFER_SHAPES] == [65_536, 1 << 20, 64 << 20, 100 * 360 * 1024]
    assert MANY.num_blocks == 100
    assert [layout_of(shape).block_bytes for shape in (*TRANSFER_SHAPES, FEW)] == [
        shape.block_bytes for shape in (*TRANSFER_SHAPES, FEW)
    ]


def test_rates_are_gigabytes_a_second_and_small_things_microseconds():
    samples = {
        ("memcpy", MANY.name): [0.01, 0.02, 0.03],
        ("memcpy", SMALL.name): [5e-6],
        ("bare_call", CALL.name): [1e-4],
    }
    checks = {check.name: (pytest.approx(check.value), check.unit, check.better) for check in checks_of(samples)}
    assert checks == {
        "memcpy_100_blocks": (1.8432, "GB/s", "higher"),
        "memcpy_64_kib": (5.0, "us", "lower"),
        "bare_call": (100.0, "us", "lower"),
    }


def test_a_share_compares_the_times_of_the_same_round_and_is_judged():
    samples = {
        ("bare_shm", MANY.name): [1.0, 10.0, 3.0],
        ("shm", MANY.name): [2.0, 16.0, 6.0],
        ("shm_no_digests", MANY.name): [1.0, 10.0, 4.0],
    }
    checks = {check.name: check for check in checks_of(samples)}
    assert (checks["shm_100_blocks_of_bare"].value, checks["shm_100_blocks_of_bare"].ok) == (0.5, False)
    assert (checks["shm_no_digests_100_blocks_of_bare"].value, checks["shm_no_digests_100_blocks_of_bare"].ok) == (
        1,
        True,
    )


def test_without_figures_of_the_bare_pair_there_is_no_share():
    assert [check.name for check in checks_of({("ucx", MANY.name): [1.0]})] == ["ucx_100_blocks"]


class FakePair:
    """Takes a millisecond for everything, but fails at what `failures` names: "open WAY", or "WAY" at its nth time."""

    def __init__(self, **failures: int) -> None:
        self._failures = failures
        self.asked: list[str] = []

    async def open(self, way: Way, shape: Shape) -> None:
        if f"open_{way.name}" in self._failures:
            raise EngineError("ModuleNotFoundError: No module named 'ucxx'")

    async def measure_s(self, way: Way, shape: Shape) -> float:
        self.asked.append(way.name)
        if Counter(self.asked)[way.name] == self._failures.get(way.name):
            raise DeadlineExceeded("no answer within 30 s")
        return 0.001


async def open_ways(own: FakePair, ucx: FakePair) -> tuple[OpenWays, list[str]]:
    notes: list[str] = []
    ways = OpenWays(notes.append)
    pairs: dict[str, Any] = {"own": own, "ucx": ucx}
    for family in ("own", "ucx"):
        await ways.open(family, pairs[family])
    return ways, notes


async def test_ways_take_turns_forwards_and_backwards_and_every_round_gives_one_sample():
    pair = FakePair()
    ways, notes = await open_ways(pair, FakePair())
    for _ in range(2):
        await ways.run_round()
    forwards = [way.name for way in WAYS if way.family == "own" and SMALL in way.shapes]
    assert pair.asked[: 2 * len(forwards)] == forwards + forwards[::-1]
    assert set(Counter(pair.asked).values()) == {2 * NUM_TIMES * len(TRANSFER_SHAPES), 2 * NUM_TIMES}
    assert {len(samples) for samples in ways.samples.values()} == {2}
    assert notes == []


async def test_a_way_that_is_not_here_has_a_reason_and_no_figures():
    ways, notes = await open_ways(FakePair(), FakePair(open_ucx=1))
    await ways.run_round()
    assert notes == ["no figures of ucx: ModuleNotFoundError: No module named 'ucxx'"]
    assert not any(name == "ucx" for name, _ in ways.samples)
    assert ("ucx_no_digests", MANY.name) in ways.samples


async def test_when_a_way_fails_in_the_middle_nothing_half_of_its_family_is_shown():
    ways, notes = await open_ways(FakePair(), FakePair(ucx=NUM_TIMES * len(TRANSFER_SHAPES) + 2))
    for _ in range(2):
        await ways.run_round()
    assert notes == ["no figures of ucx: no answer within 30 s"]
    assert not any(way_named(name).family == "ucx" for name, _ in ways.samples)
    assert len(ways.samples["tcp", MANY.name]) == 2


async def test_without_our_own_paths_there_is_no_bench():
    with pytest.raises(EngineError, match="ucxx"):
        await open_ways(FakePair(open_tcp=1), FakePair())
    ways, _ = await open_ways(FakePair(shm=3), FakePair())
    with pytest.raises(DeadlineExceeded):
        await ways.run_round()


async def test_every_way_of_our_own_moves_the_source_s_blocks_between_two_processes():
    async with transfer_pair(CORES) as pair:
        for way in WAYS:
            if way.family == "own":
                shape = CALL if CALL in way.shapes else FEW
                await pair.open(way, shape)  # sees that they have arrived
                assert 0 < await pair.measure_s(way, shape) < 5, way.name


async def test_a_target_that_does_not_have_the_source_s_blocks_is_found_out():
    async with transfer_pair(CORES) as pair:
        await pair.open(way_named("tcp"), FEW)
        await pair._ask(pair._target, Open("bare_shm", FEW), Opened)  # wipes the pool
        with pytest.raises(EngineError, match="not those of the source"):
            await pair._ask(pair._target, Inspect(FEW), Done)


@pytest.mark.parametrize(("name", "module"), [("nixl", "nixl"), ("mooncake", "mooncake"), ("bare_ucxx", "ucxx")])
async def test_a_library_that_is_not_installed_is_named_in_one_line(name, module):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed here")
    async with transfer_pair(CORES) as pair:
        with pytest.raises(EngineError) as caught:
            await pair.open(way_named(name), FEW)
    assert "ModuleNotFoundError" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
@pytest.mark.parametrize("name", ["bare_ucxx", "bare_ucxx_polling"])
async def test_the_bare_ucxx_pair_moves_the_source_s_blocks_between_two_processes(name):
    async with transfer_pair(CORES) as pair:
        await pair.open(way_named(name), FEW)
        assert 0 < await pair.measure_s(way_named(name), FEW) < 5


async def test_a_process_that_dies_is_an_error_and_no_wait():
    async with transfer_pair(CORES) as pair:
        await pair.open(way_named("bare_socket"), FEW)
        pair._source.kill()
        with pytest.raises(EngineError):
            await pair.measure_s(way_named("bare_socket"), FEW)


def test_pairs_and_fakes_are_asked_alike():
    for name in ("open", "measure_s"):
        assert getattr(TransferPair, name).__annotations__ == getattr(FakePair, name).__annotations__
