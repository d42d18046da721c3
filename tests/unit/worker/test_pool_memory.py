"""The pool's bytes."""

from __future__ import annotations

import pytest

from pd_worker.memory import PoolMemory


def test_blocks_lie_one_after_the_other_and_are_zero_at_first() -> None:
    memory = PoolMemory(3, 16)
    assert bytes(memory.buffer) == bytes(48)
    memory.block(1)[:] = b"x" * 16
    assert bytes(memory.buffer) == bytes(16) + b"x" * 16 + bytes(16)
    assert (memory.num_blocks, memory.block_bytes) == (3, 16)
    memory.close()


def test_the_buffer_is_what_engine_and_transport_expect() -> None:
    memory = PoolMemory(2, 8)
    view = memory.buffer
    assert (view.format, view.ndim, view.nbytes, view.readonly, view.contiguous) == ("B", 1, 16, False, True)
    view.release()
    memory.close()


@pytest.mark.parametrize("block_id", [-1, 3, 99])
def test_blocks_outside_the_pool_do_not_exist(block_id: int) -> None:
    memory = PoolMemory(3, 16)
    with pytest.raises(IndexError):
        memory.block(block_id)
    memory.close()


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 16), (-1, 16), (3, 0)])
def test_a_pool_without_bytes_is_refused(num_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="a pool has blocks"):
        PoolMemory(num_blocks, block_bytes)


def test_closing_twice_is_fine_and_a_view_that_is_left_stays_valid() -> None:
    memory = PoolMemory(2, 8)
    block = memory.block(1)
    block[0] = 5
    memory.close()
    memory.close()
    assert block[0] == 5


def test_large_pools_take_no_memory_before_they_are_used() -> None:
    memory = PoolMemory(1 << 14, 1 << 20)  # 16 GiB
    memory.block(1 << 13)[0] = 1
    memory.close()
