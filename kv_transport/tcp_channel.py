"""One destination of a TcpBlockSender: a queue of pushes, a thread that writes them, at most one connection.

submit --> queue --> thread: connect when needed, write --> outcome
             withdraw: still queued: taken out; being written: the socket is shut down, the thread leaves
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from kv_transport.push_job import PushJob, PushOutcome, PushState
from kv_transport.tcp import TcpOptions
from kv_transport.tcp_frames import blocks_per_frame, encode_frame_start
from kv_transport.tcp_sockets import is_closed_by_peer, send_all, size_buffers, tune
from pd_core.errors import KvrelayError, TransferError
from pd_core.memory import BlockMemory
from pd_rpc.address import format_address

_log = logging.getLogger(__name__)


class Channel:
    """All pushes to one host and port. `run` is its thread; the other methods are called from the event loop.

    authenticate: runs the handshake on a connected socket within so many seconds; raises KvrelayError or OSError
    """

    def __init__(
        self,
        host: str,
        port: int,
        memory: BlockMemory,
        options: TcpOptions,
        authenticate: Callable[[socket.socket, float], object],
    ) -> None:
        self.address = format_address(host, port)
        self.room = asyncio.Semaphore(options.max_queued_pushes)
        self._host = host
        self._port = port
        self._memory = memory
        self._options = options
        self._authenticate = authenticate
        self._frame_blocks = blocks_per_frame(memory.block_bytes, options.max_frame_bytes)
        self._changed = threading.Condition()
        self._queue: deque[PushJob] = deque()
        self._sock: socket.socket | None = None
        self._is_connected = False
        self._is_retired = False

    @property
    def is_retired(self) -> bool:
        """Its thread has ended or is about to."""
        return self._is_retired

    def submit(self, job: PushJob) -> bool:
        """False when the channel is retired: the caller needs a new one."""
        with self._changed:
            if self._is_retired:
                return False
            self._queue.append(job)
            self._changed.notify()
            return True

    def withdraw(self, job: PushJob) -> None:
        """Nobody wants the push any more. Its outcome is done as soon as no thread reads its blocks."""
        with self._changed:
            if job.state is PushState.QUEUED:
                job.state = PushState.OVER
                self._queue.remove(job)
                job.finish(PushOutcome(error=TransferError(f"{self.address}: withdrawn before it was written")))
            elif job.state is PushState.WRITING:
                self._shut_down()

    def stop(self) -> None:
        """Ends the thread: what is queued fails, what is being written is cut off."""
        with self._changed:
            self._is_retired = True
            self._shut_down()
            self._changed.notify()

    def run(self) -> None:
        """Writes pushes until stopped, or until nothing came for `sender_idle_s`."""
        try:
            while self._wait_for_push():
                if self._is_ready():
                    self._write_next()
        finally:
            with self._changed:
                self._is_retired = True
            self._disconnect()
            self._fail_queued(TransferError(f"{self.address}: the KV sender is closed"), was_reached=True)

    def _wait_for_push(self) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._queue or self._is_retired, self._options.sender_idle_s):
                self._is_retired = True
            return not self._is_retired

    def _is_ready(self) -> bool:
        """Has a live connection, or makes one. When that fails, nobody in the queue is left to wait for it again."""
        if self._is_connected and self._sock is not None and not is_closed_by_peer(self._sock):
            return True
        self._disconnect()
        try:
            self._connect()
        except TransferError as error:
            failure = error
        except KvrelayError as error:
            failure = TransferError(error.message)  # it names the address
        except OSError as error:
            failure = TransferError(f"{self.address}: no KV connection: {error}")
        else:
            return True
        self._disconnect()
        self._fail_queued(failure, was_reached=False)
        return False

    def _connect(self) -> None:
        """Tries what the name resolves to, in order, within one deadline. Raises KvrelayError or OSError."""
        ends_s = time.monotonic() + self._options.handshake_s
        failure: OSError = TimeoutError("no address")
        for family, kind, protocol, _, where in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            sock = self._adopt(socket.socket(family, kind, protocol))
            try:
                size_buffers(sock, self._options)
                sock.settimeout(_left_s(ends_s))
                sock.connect(where)
            except OSError as error:
                failure = error
                self._disconnect()
                continue
            tune(sock, self._options)
            self._authenticate(sock, _left_s(ends_s))
            sock.settimeout(None)
            self._is_connected = True
            return
        raise failure

    def _adopt(self, sock: socket.socket) -> socket.socket:
        """From here on `stop` reaches the socket."""
        with self._changed:
            self._sock = sock
            if self._is_retired:
                raise TransferError(f"{self.address}: the KV sender is closed")
        return sock

    def _write_next(self) -> None:
        with self._changed:
            sock = self._sock
            if not self._queue or self._is_retired or sock is None:
                return  # withdrawn or stopped while we connected
            job = self._queue.popleft()
            job.state = PushState.WRITING
        started_s = time.monotonic()
        error: TransferError | None = TransferError(f"{self.address}: the push did not come to its end")
        try:
            self._write(sock, job)
            error = None
        except OSError as broken:
            error = TransferError(f"{self.address}: the KV connection broke: {broken}")
        finally:
            with self._changed:
                job.state = PushState.OVER
            if error is not None:
                self._disconnect()
            job.finish(PushOutcome(time.monotonic() - started_s, error))

    def _write(self, sock: socket.socket, job: PushJob) -> None:
        for first in range(0, len(job.indices), self._frame_blocks):
            part = slice(first, first + self._frame_blocks)
            start = encode_frame_start(job.ref, job.indices[part], job.digests[part], self._memory.block_bytes)
            send_all(sock, [memoryview(start), *map(self._memory.block, job.block_ids[part])])
        if is_closed_by_peer(sock):
            raise ConnectionError("closed by the receiver")

    def _fail_queued(self, error: TransferError, *, was_reached: bool) -> None:
        with self._changed:
            while self._queue:
                job = self._queue.popleft()
                job.state = PushState.OVER
                job.finish(PushOutcome(error=error, was_reached=was_reached))

    def _disconnect(self) -> None:
        with self._changed:
            self._is_connected = False
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def _shut_down(self) -> None:
        if self._sock is None:
            return
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("%s was shut down already: %s", self.address, error)


def _left_s(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
