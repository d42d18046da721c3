"""The threads before the disk: bounded, reads first, and one of them is always left to reads."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable

from nvme_parts import SOON_S, until

from kv_store.nvme_threads import DiskThreads, Inbox, Lane


def nothing() -> None:
    return None


class Recorded:
    """Jobs that write down their names; the first to run waits for the gate."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()

    def job(self, name: str, waits: threading.Event | None = None) -> Callable[[memoryview], Callable[[], None]]:
        def run(buffer: memoryview) -> Callable[[], None]:
            if waits is not None:
                assert waits.wait(SOON_S)
            self.names.append(name)
            return nothing

        return run


async def test_reads_go_before_what_was_there_first() -> None:
    done, threads = Recorded(), DiskThreads(1, 10, 4096)
    threads.put(Lane.OTHERS, done.job("write 1"))
    threads.put(Lane.OTHERS, done.job("write 2"))
    threads.put(Lane.READS, done.job("read"))
    threads.start(asyncio.get_running_loop())
    threads.close()
    await threads.join()
    assert done.names == ["read", "write 1", "write 2"]


async def test_one_thread_is_left_to_reads_when_all_others_are_stuck() -> None:
    done, threads = Recorded(), DiskThreads(3, 10, 4096)
    threads.start(asyncio.get_running_loop())
    for number in range(5):
        assert threads.put(Lane.OTHERS, done.job(f"write {number}", done.gate))
    await until(lambda: threads.num_queued == 3)
    threads.put(Lane.READS, done.job("read"))
    await until(lambda: done.names == ["read"])
    done.gate.set()
    threads.close()
    await threads.join()
    assert len(done.names) == 6


async def test_a_full_queue_takes_no_more_and_a_closed_one_nothing() -> None:
    done, threads = Recorded(), DiskThreads(1, 2, 4096)
    assert [threads.put(Lane.READS, done.job("read")) for _ in range(4)] == [True, True, False, False]
    assert threads.put(Lane.OTHERS, done.job("write"))
    threads.start(asyncio.get_running_loop())
    threads.close()
    assert not threads.put(Lane.READS, done.job("late"))
    await threads.join()
    assert done.names == ["read", "read", "write"]


async def test_the_time_of_the_oldest_call_is_known_while_it_runs() -> None:
    done, threads = Recorded(), DiskThreads(2, 2, 4096)
    threads.start(asyncio.get_running_loop())
    assert threads.longest_s() == 0.0
    threads.put(Lane.READS, done.job("stuck", done.gate))
    await until(lambda: threads.longest_s() > 0.05)
    done.gate.set()
    await until(lambda: threads.longest_s() == 0.0)
    threads.close()
    await threads.join()


async def test_buffers_lie_on_page_boundaries() -> None:
    addresses: list[int] = []
    threads = DiskThreads(2, 2, 12288)

    def look(buffer: memoryview) -> Callable[[], None]:
        assert len(buffer) == 12288
        addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
        return nothing

    threads.put(Lane.READS, look)
    threads.start(asyncio.get_running_loop())
    threads.close()
    await threads.join()
    assert [address % 4096 for address in addresses] == [0]


async def test_what_threads_have_done_comes_in_order_and_an_error_takes_nothing_with_it() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    came: list[int] = []

    def put_all() -> None:
        for number in range(1000):
            inbox.put(lambda number=number: came.append(number))  # type: ignore[misc]
            if number == 500:
                inbox.put(lambda: 1 // 0)  # type: ignore[arg-type,return-value]

    thread = threading.Thread(target=put_all)
    thread.start()
    async with asyncio.timeout(SOON_S):
        await inbox.until(lambda: len(came) == 1000)
    thread.join()
    assert came == list(range(1000))


async def test_whoever_waits_for_news_can_be_cancelled_and_others_go_on() -> None:
    inbox = Inbox(asyncio.get_running_loop())
    is_so = [False]
    waiting = [asyncio.create_task(inbox.until(lambda: is_so[0])) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    began_s = time.monotonic()
    is_so[0] = True
    inbox.wake()
    await waiting[1]
    assert time.monotonic() - began_s < SOON_S
    assert (await asyncio.gather(*waiting, return_exceptions=True))[1] is None and waiting[0].cancelled()
