"""A pool as a sealed file: who may do what with it, and which files a reader refuses."""

import fcntl
import gc
import mmap
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kv_transport.shm_pool import FIXED_SIZE, ForeignPool, PoolFile, copy_block
from pd_core.errors import ProtocolError

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20


@pytest.fixture
def pool():
    made = PoolFile(3, 1000)
    yield made
    os.close(made.fd)


def num_maps():
    return Path("/proc/self/maps").read_text().count("kvrelay-pool")


def test_another_sees_what_its_maker_writes_and_cannot_write_itself(pool):
    seen = ForeignPool(pool.fd, 3, 1000, pool.nonce)
    pool.blocks[1000:2000] = bytes(range(250)) * 4
    assert bytes(seen.block(1)) == bytes(range(250)) * 4
    assert not any(seen.block(0)) and not any(seen.block(2))
    with pytest.raises(ValueError, match="read-only"):
        seen.block(1)[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        seen.block(1).setflags(write=True)


def test_nobody_but_its_maker_can_write_to_it_or_change_its_size(pool):
    size = os.fstat(pool.fd).st_size
    again = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDWR)
    for attempt in (
        lambda: mmap.mmap(again, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.write(again, b"x"),
        lambda: os.ftruncate(again, 0),
        lambda: os.ftruncate(again, size + 1),
        lambda: fcntl.fcntl(again, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            attempt()
    os.close(again)


def test_a_pool_is_no_file_that_anybody_finds_and_no_two_are_the_same(pool):
    other = PoolFile(3, 1000)
    assert other.nonce != pool.nonce
    assert str(Path(f"/proc/self/fd/{pool.fd}").readlink()) == "/memfd:kvrelay-pool (deleted)"
    os.close(other.fd)


def test_pages_go_with_the_last_view_and_without_a_word(pool):
    before = num_maps()
    other = PoolFile(2, PAGE)
    seen = ForeignPool(other.fd, 2, PAGE, other.nonce)
    os.close(other.fd)
    array = np.frombuffer(other.blocks, np.uint8)
    array[0] = 7
    del other
    block = seen.block(0)
    del seen
    gc.collect()
    assert block[0] == 7
    assert num_maps() == before + 2
    del block, array
    assert num_maps() == before


@pytest.mark.parametrize("block_id", [-1, 3, 2**40])
def test_blocks_outside_a_foreign_pool_do_not_exist(pool, block_id):
    with pytest.raises(ProtocolError, match="of a pool of 3"):
        ForeignPool(pool.fd, 3, 1000, pool.nonce).block(block_id)


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "nonce", "reason"),
    [
        (3, 1000, bytes(16), "label"),
        (6, 500, None, "label"),
        (1, 3000, None, "label"),
        (30, 1000, None, "were announced"),
        (1 << 40, 1 << 40, None, "were announced"),
    ],
)
def test_a_pool_that_is_not_the_announced_one_is_refused(pool, num_blocks, block_bytes, nonce, reason):
    before = num_maps()
    with pytest.raises(ProtocolError, match=reason):
        ForeignPool(pool.fd, num_blocks, block_bytes, nonce or pool.nonce)
    assert num_maps() == before


def memfd(seals: int, flags: int = 0) -> int:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, HUGE_PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("make_file", "reason"),
    [
        (lambda: memfd(0), "could change its size"),
        (lambda: memfd(fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "could change its size"),
        (lambda: memfd(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL), "could change its size"),
        (lambda: memfd(FIXED_SIZE), "label"),
        (lambda: memfd(FIXED_SIZE, os.MFD_HUGETLB), "ordinary shared memory"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "no memfd"),
        (lambda: os.open(__file__, os.O_RDONLY), "no memfd"),
        (lambda: os.open("/proc/self/maps", os.O_RDONLY), "no memfd"),
    ],
)
def test_a_file_whose_bytes_need_not_stay_is_refused(make_file, reason):
    fd = make_file()
    with pytest.raises(ProtocolError, match=reason):
        ForeignPool(fd, HUGE_PAGE // PAGE - 1, PAGE, bytes(16))
    os.close(fd)


def test_a_copy_of_a_block_is_a_copy():
    source, into = bytearray(range(200)), bytearray(200)
    copy_block(np.frombuffer(memoryview(source).toreadonly(), np.uint8), np.frombuffer(into, np.uint8))
    source[0] = 99
    assert into == bytes(range(200))


def test_others_run_while_a_block_is_copied():
    """Nobody who holds the interpreter lock is asked for it here: a thread that runs beside a copy was let in by it."""
    source, into = np.ones(16 << 20, np.uint8), np.zeros(16 << 20, np.uint8)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        assert any(is_seen_running(lambda: copy_block(source, into)) for _ in range(50))
        assert not any(is_seen_running(into.tobytes) for _ in range(3))
    finally:
        sys.setswitchinterval(interval_s)


def is_seen_running(work) -> bool:
    begins, ended = threading.Event(), threading.Event()

    def run():
        begins.set()
        work()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    begins.wait()
    was_running = not ended.is_set()
    thread.join()
    return was_running
