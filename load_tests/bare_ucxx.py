"""bare_ucxx: the least that moves blocks over UCX between two processes, by ucxx, the library that our path uses.

A tag send and a tag receive for each block, all posted at once; then both sides wait for them. UCX has the settings and
the error handling of our path; there are no names of blocks, no permits, no digests.

Both sides sleep while UCX has nothing to do, as our path does; or they never sleep: bare_ucxx_polling.
"""

from __future__ import annotations

import base64
import importlib
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from kv_transport.ucx_settings import ucx_settings
from load_tests.transfer_halves import HOST, PUSH_S, Pool
from load_tests.transfer_messages import Sent
from pd_core.errors import DeadlineExceeded


class _Ucx:
    """A context and a worker. Raises ImportError without ucxx, or what it raises when UCX does not work.

    pause_ms: longest sleep in between, when UCX says that there is nothing to do
    """

    def __init__(self, blocks: Sequence[memoryview], pause_ms: float) -> None:
        self._pause_ms = pause_ms
        lib: Any = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
        self.lib = lib
        self.worker = lib.UCXWorker(lib.UCXContext(ucx_settings(HOST), (lib.Feature.TAG, lib.Feature.WAKEUP)))
        self.worker.init_blocking_progress_mode()
        self._events = select.poll()
        self._events.register(self.worker.epoll_file_descriptor, select.POLLIN)
        self.blocks = [array(block) for block in blocks]
        self.tags = [lib.UCXXTag(number) for number in range(len(blocks))]

    def finish(self, requests: Sequence[Any]) -> None:
        """Lets UCX work until all are complete. Raises what one failed with, DeadlineExceeded."""
        ends_s = time.monotonic() + PUSH_S
        pending = list(requests)
        while pending:
            self.worker.progress()
            pending = [request for request in pending if not request.completed]
            if pending and self._pause_ms and self.worker.arm():
                self._events.poll(self._pause_ms)
            if time.monotonic() > ends_s:
                raise DeadlineExceeded(f"UCX did not move the blocks within {PUSH_S:g} s")
        for request in requests:
            request.check_error()


class BareUcxxSource:
    """SourceHalf."""

    def __init__(self, pool: Pool, pause_ms: float = PUSH_S * 1e3) -> None:
        self._ucx = _Ucx(pool.blocks, pause_ms)
        self._endpoint: Any = None

    async def connect(self, offer: str) -> None:
        lib = self._ucx.lib
        address = lib.UCXAddress.create_from_buffer(base64.b64decode(offer))
        self._endpoint = lib.UCXEndpoint.create_from_worker_address(self._ucx.worker, address, True)

    async def send(self, note: str) -> Sent:
        ucx, endpoint = self._ucx, self._endpoint
        began_s = time.monotonic()
        ucx.finish([endpoint.tag_send(block, tag) for block, tag in zip(ucx.blocks, ucx.tags, strict=True)])
        return Sent(began_s, time.monotonic())

    async def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close_blocking()


class BareUcxxTarget:
    """TargetHalf."""

    def __init__(self, pool: Pool, pause_ms: float = PUSH_S * 1e3) -> None:
        self._ucx = _Ucx(pool.blocks, pause_ms)

    async def open(self) -> str:
        return base64.b64encode(self._ucx.worker.address.tobytes()).decode()

    async def receive(self, say_ready: Callable[[str], None]) -> float:
        ucx = self._ucx
        requests = [ucx.worker.tag_recv(block, tag) for block, tag in zip(ucx.blocks, ucx.tags, strict=True)]
        say_ready("")
        ucx.finish(requests)
        return time.monotonic()

    async def close(self) -> None:
        """The worker goes with the process."""
