"""Small pages of a pool become huge ones behind its users."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import pytest

from kv_transport.shm_pool import HUGE_PAGE_BYTES
from pd_worker import huge_pages
from pd_worker.memory import PoolMemory

BLOCK_BYTES = HUGE_PAGE_BYTES // 4
NUM_PIECES = 8


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "LOOK_S", 0.002)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which pieces the kernel was asked for, each time; it says yes to all."""
    return kernel_says(monkeypatch, lambda _: 0)


def kernel_says(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], int]) -> list[int]:
    asked: list[int] = []

    def collapse(pool: huge_pages.HugePages, piece: int) -> int:
        asked.append(piece)
        return answer(piece)

    monkeypatch.setattr(huge_pages.HugePages, "_collapse", collapse)
    return asked


def until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def pages_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pool-pages"]


def test_only_pieces_in_use_are_asked_for_and_each_once(asked: list[int]) -> None:
    memory = PoolMemory(4 * NUM_PIECES, BLOCK_BYTES)
    time.sleep(0.02)
    assert asked == []
    memory.block(9)[5] = 1
    memory.block(31)[5] = 1
    until(lambda: len(asked) == 2)
    memory.block(2)[0] = 1
    memory.block(10)[0] = 1
    until(lambda: len(asked) == 3)
    time.sleep(0.02)
    assert asked == [2, 7, 0]
    memory.close()


def test_a_piece_that_is_refused_for_the_moment_is_tried_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {0: [errno.EAGAIN, 0], 1: [errno.ENOMEM] * 100}
    asked = kernel_says(monkeypatch, lambda piece: answers[piece].pop(0))
    memory = PoolMemory(8, BLOCK_BYTES)
    memory.buffer[:] = b"x" * len(memory.buffer)
    until(lambda: not pages_threads())
    assert asked.count(0) == 2
    assert asked.count(1) == huge_pages.MAX_TRIES
    memory.close()


def test_a_kernel_that_cannot_do_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = kernel_says(monkeypatch, lambda _: errno.EINVAL)
    memory = PoolMemory(4 * NUM_PIECES, BLOCK_BYTES)
    memory.buffer[:] = b"x" * len(memory.buffer)
    until(lambda: not pages_threads())
    assert asked == [0]
    memory.close()


def test_when_every_piece_is_done_the_thread_ends_and_a_small_pool_has_none(asked: list[int]) -> None:
    memory, small = PoolMemory(4 * NUM_PIECES, BLOCK_BYTES), PoolMemory(3, BLOCK_BYTES)
    assert len(pages_threads()) == 1
    memory.buffer[:] = b"x" * len(memory.buffer)
    until(lambda: not pages_threads())
    assert asked == list(range(NUM_PIECES))
    memory.close()
    small.close()


def test_closing_ends_the_thread() -> None:
    memory = PoolMemory(4 * NUM_PIECES, BLOCK_BYTES)
    memory.close()
    memory.close()
    assert not pages_threads()


def test_no_byte_is_lost_while_pages_move_and_the_kernel_here_does_it_or_says_that_it_cannot() -> None:
    memory = PoolMemory(4 * NUM_PIECES, BLOCK_BYTES)
    for round_number in range(5):
        for block_id in range(memory.num_blocks):
            memory.block(block_id)[:] = bytes([round_number]) * BLOCK_BYTES
        for block_id in range(memory.num_blocks):
            assert memory.block(block_id) == bytes([round_number]) * BLOCK_BYTES
    until(lambda: not pages_threads())
    memory.close()
