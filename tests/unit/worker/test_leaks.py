"""The leak check itself: it sees what is left, and is silent when nothing is."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading

import pytest
from leaks import no_leaks


async def test_a_clean_block_passes() -> None:
    async with no_leaks(settle_s=0.05):
        await asyncio.sleep(0)


async def test_what_ends_soon_is_not_left_behind() -> None:
    async with no_leaks(settle_s=10.0):
        task = asyncio.ensure_future(asyncio.sleep(0.03))
    assert task.done()


async def test_a_task_that_is_left_is_named() -> None:
    with pytest.raises(AssertionError, match=r"task: .*forgotten"):
        async with no_leaks(settle_s=0.05):
            task = asyncio.get_running_loop().create_task(asyncio.sleep(60), name="forgotten")
    task.cancel()


async def test_a_thread_that_is_left_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(AssertionError, match="thread: forgotten"):
        async with no_leaks(settle_s=0.05):
            thread.start()
    stop.set()
    thread.join()


async def test_a_socket_that_is_left_is_named() -> None:
    kept = []
    with pytest.raises(AssertionError, match=r"file: \d+ -> socket"):
        async with no_leaks(settle_s=0.05):
            kept.append(socket.socket())
    kept[0].close()


async def test_a_process_that_is_left_is_named() -> None:
    kept = []
    with pytest.raises(AssertionError, match=r"process \d+"):
        async with no_leaks(settle_s=0.05):
            kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))  # noqa: ASYNC220
    kept[0].kill()
    kept[0].communicate()


async def test_an_error_of_the_block_is_not_hidden() -> None:
    task = None
    with pytest.raises(ZeroDivisionError):
        async with no_leaks(settle_s=0.05):
            task = asyncio.ensure_future(asyncio.sleep(60))
            raise ZeroDivisionError
    assert task is not None
    task.cancel()
