"""What lies on the disk was damaged while nobody looked: every damage is a miss, counted, and goes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nvme_parts import (
    SLOT_BYTES,
    SOON_S,
    block,
    chain,
    changed,
    fingerprint,
    name_of,
    opened,
    read_back,
    set_folder,
    settings,
    until,
    written,
)

from kv_store.nvme_tier import NvmeTier
from kv_store.slot_format import HEADER_BYTES, PAGE_BYTES, SlotHeader, pack_header, set_page

PAGE = set_page(fingerprint())


async def filled(folder: Path) -> None:
    """A store with the sequences 1, 2, 3 of four blocks each, in slots 0 to 11."""
    async with opened(settings(folder)) as tier:
        for sequence in (1, 2, 3):
            for b in chain(sequence, 4):
                await written(tier, [b])


async def all_blocks(tier: NvmeTier) -> list[list[bool]]:
    return [await read_back(tier, chain(sequence, 4)) for sequence in (1, 2, 3)]


def num_corrupt(tier: NvmeTier) -> int:
    return tier.stats().counters["nvme_blocks_corrupt_total"]


async def no_damage_left(tier: NvmeTier) -> None:
    """Nothing is on its way out any more, and what is missing can be written again."""
    await until(lambda: tier.stats().num_wiping == 0)
    for sequence in (1, 2, 3):
        await tier.write(chain(sequence, 4), SOON_S)
    assert await all_blocks(tier) == [[True] * 4] * 3


def header_at(slot: int) -> slice:
    return slice(PAGE_BYTES + slot * HEADER_BYTES, PAGE_BYTES + (slot + 1) * HEADER_BYTES)


def body_at(slot: int) -> slice:
    return slice(slot * SLOT_BYTES, (slot + 1) * SLOT_BYTES)


@pytest.mark.parametrize("offset", [0, 1999, 3999])
async def test_a_flipped_bit_in_a_body_costs_the_block_and_what_continues_it(tmp_path: Path, offset: int) -> None:
    await filled(tmp_path)
    with changed(set_folder(tmp_path) / "bodies") as bodies:
        bodies[5 * SLOT_BYTES + offset] ^= 0x10
    async with opened(settings(tmp_path)) as tier:
        assert await all_blocks(tier) == [[True] * 4, [True, False, True, True], [True] * 4]  # asked for at once
        assert await all_blocks(tier) == [[True] * 4, [True, False, False, False], [True] * 4]
        assert num_corrupt(tier) == 1
        await no_damage_left(tier)


@pytest.mark.parametrize("offset", [0, 4, 8, 33, 50, 70, 85, 100, 121])
async def test_a_flipped_bit_in_a_header_costs_the_block_and_what_continues_it(tmp_path: Path, offset: int) -> None:
    await filled(tmp_path)
    with changed(set_folder(tmp_path) / "headers") as headers:
        headers[PAGE_BYTES + 5 * HEADER_BYTES + offset] ^= 1
    async with opened(settings(tmp_path)) as tier:
        assert num_corrupt(tier) == 1
        assert tier.stats().counters["nvme_blocks_orphaned_total"] == 2
        assert await all_blocks(tier) == [[True] * 4, [True, False, False, False], [True] * 4]
        await no_damage_left(tier)
    async with opened(settings(tmp_path)) as tier:
        assert num_corrupt(tier) == 0  # the bad header has gone


def swap_bodies(folder: Path) -> None:
    with changed(folder / "bodies") as bodies:
        bodies[body_at(1)], bodies[body_at(9)] = bodies[body_at(9)], bodies[body_at(1)]


def swap_headers(folder: Path) -> None:
    with changed(folder / "headers") as headers:
        headers[header_at(1)], headers[header_at(9)] = headers[header_at(9)], headers[header_at(1)]


def swap_whole_slots(folder: Path) -> None:
    swap_bodies(folder)
    swap_headers(folder)


@pytest.mark.parametrize("swap", [swap_bodies, swap_headers, swap_whole_slots])
async def test_swapped_slots_are_misses(tmp_path: Path, swap: Callable[[Path], None]) -> None:
    await filled(tmp_path)
    swap(set_folder(tmp_path))
    async with opened(settings(tmp_path)) as tier:
        await all_blocks(tier)
        assert await all_blocks(tier) == [[True, False, False, False], [True] * 4, [True, False, False, False]]
        assert num_corrupt(tier) == 2
        await no_damage_left(tier)


async def test_files_swapped_between_two_models_are_no_blocks_of_the_other(tmp_path: Path) -> None:
    await filled(tmp_path)
    other = fingerprint("other")
    async with opened(settings(tmp_path), model=other) as tier:
        await written(tier, chain(7, 4))
    mine, its = (tmp_path / f"v1-{set_page(model).set_id.hex()}" for model in (fingerprint(), other))
    for name in ("bodies", "headers"):
        mine_bytes, its_bytes = (mine / name).read_bytes(), (its / name).read_bytes()
        (mine / name).write_bytes(its_bytes)
        (its / name).write_bytes(mine_bytes)
    for model in (fingerprint(), other):
        async with opened(settings(tmp_path), model=model) as tier:
            assert tier.blocks() == []  # the set's page says that it is another's
            await written(tier, chain(1, 4))


async def test_headers_copied_from_another_model_are_no_headers(tmp_path: Path) -> None:
    await filled(tmp_path)
    other = set_page(fingerprint("other"))
    foreign = SlotHeader(name_of(9, 0), name_of(9, -1), 0, 1, 4000, 99)
    with changed(set_folder(tmp_path) / "headers") as headers:
        headers[header_at(0)] = pack_header(foreign, 0, other.set_id)
    async with opened(settings(tmp_path)) as tier:
        assert (num_corrupt(tier), tier.holds(name_of(9, 0))) == (1, False)


@pytest.mark.parametrize("num_bytes", [0, 1, SLOT_BYTES - 1, 5 * SLOT_BYTES + 7, 12 * SLOT_BYTES - 1])
async def test_cut_bodies_lose_what_was_cut(tmp_path: Path, num_bytes: int) -> None:
    await filled(tmp_path)
    with changed(set_folder(tmp_path) / "bodies") as bodies:
        del bodies[num_bytes:]
    async with opened(settings(tmp_path)) as tier:
        num_whole = num_bytes // SLOT_BYTES
        there = [name for came in await all_blocks(tier) for name in came]
        assert there == [slot < num_whole for slot in range(12)]
        await no_damage_left(tier)
    async with opened(settings(tmp_path)) as tier:
        assert await all_blocks(tier) == [[True] * 4] * 3


@pytest.mark.parametrize("num_bytes", [0, 100, PAGE_BYTES, PAGE_BYTES + 5 * HEADER_BYTES + 7])
async def test_cut_headers_lose_what_was_cut(tmp_path: Path, num_bytes: int) -> None:
    await filled(tmp_path)
    with changed(set_folder(tmp_path) / "headers") as headers:
        del headers[num_bytes:]
    async with opened(settings(tmp_path)) as tier:
        num_whole = max(0, num_bytes - PAGE_BYTES) // HEADER_BYTES
        there = [name for came in await all_blocks(tier) for name in came]
        assert there == [slot < num_whole for slot in range(12)]
        await no_damage_left(tier)
        assert tier.stats().num_slots * SLOT_BYTES == (set_folder(tmp_path) / "bodies").stat().st_size  # no space leaks


async def test_bodies_cut_while_they_are_open_are_misses(tmp_path: Path) -> None:
    async with opened(settings(tmp_path, look_every_s=60.0)) as tier:
        await written(tier, chain(1, 4))
        with (set_folder(tmp_path) / "bodies").open("r+b") as bodies:
            bodies.truncate(2 * SLOT_BYTES + 100)
        await read_back(tier, chain(1, 4))
        assert await read_back(tier, chain(1, 4)) == [True, True, False, False]
        await written(tier, chain(1, 4)[2:])


@pytest.mark.parametrize("name", ["headers", "bodies"])
async def test_garbage_is_never_served(tmp_path: Path, name: str) -> None:
    await filled(tmp_path)
    chance = random.Random(5)
    with changed(set_folder(tmp_path) / name) as data:
        data[:] = chance.randbytes(len(data))
    async with opened(settings(tmp_path)) as tier:
        assert await all_blocks(tier) == [[False] * 4] * 3
        await no_damage_left(tier)


async def test_stray_unfinished_sets_are_swept_and_other_strange_things_are_not(tmp_path: Path) -> None:
    await filled(tmp_path)
    unfinished = tmp_path / f"v1-{'0' * 32}.tmp"
    unfinished.mkdir()
    (unfinished / "bodies").write_bytes(b"x")
    strange = tmp_path / "mine.tmp"
    strange.write_bytes(b"x")
    async with opened(settings(tmp_path)) as tier:
        assert (unfinished.exists(), strange.exists()) == (False, True)
        assert await all_blocks(tier) == [[True] * 4] * 3


@pytest.mark.parametrize("what", ["a file", "an empty folder"])
async def test_a_set_that_is_no_set_is_made_anew(tmp_path: Path, what: str) -> None:
    await filled(tmp_path)
    mine = set_folder(tmp_path)
    shutil.rmtree(mine)
    mine.write_bytes(b"x") if what == "a file" else mine.mkdir()
    async with opened(settings(tmp_path)) as tier:
        assert tier.blocks() == []
        await no_damage_left(tier)


async def test_an_older_copy_of_a_block_does_not_hide_the_newer(tmp_path: Path) -> None:
    await filled(tmp_path)
    old = SlotHeader(name_of(3, 3), name_of(3, 2), 3, block(3, 3).digest, 4000, 1)
    with changed(set_folder(tmp_path) / "headers") as headers:
        assert headers[header_at(15)] == bytes(HEADER_BYTES)
        headers[header_at(15)] = pack_header(old, 15, PAGE.set_id)
    async with opened(settings(tmp_path)) as tier:
        assert await all_blocks(tier) == [[True] * 4] * 3
        await no_damage_left(tier)


async def test_random_damage_never_gives_a_wrong_byte_or_an_orphan(tmp_path: Path) -> None:
    """read_back compares every byte that comes, and `opened` the index."""
    for seed in range(12):
        chance = random.Random(seed)
        await filled(tmp_path)
        for _ in range(chance.randrange(1, 6)):
            with changed(set_folder(tmp_path) / chance.choice(["headers", "bodies"])) as data:
                begin = chance.randrange(len(data))
                length = chance.choice([1, 8, 128, 512, 5000])
                data[begin : begin + length] = chance.randbytes(min(length, len(data) - begin))
        async with opened(settings(tmp_path)) as tier:
            await all_blocks(tier)
            await no_damage_left(tier)
        shutil.rmtree(set_folder(tmp_path))
