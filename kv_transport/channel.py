"""One connection to a destination of a ChannelSender: a queue of pushes, a thread that writes them.

submit --> queue --> thread: connect when needed, write --> outcome
             withdraw: still queued: taken out; being written: the socket is shut down, the thread leaves
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kv_transport.path_options import PathOptions
from kv_transport.push_job import PushJob, PushOutcome, PushState
from kv_transport.sockets import is_quiet, num_unacknowledged, shut_down
from pd_core.errors import KvrelayError, TransferError


class Wire(Protocol):
    """How one path connects to one destination and writes there. Its methods belong to the channel's thread."""

    @property
    def address(self) -> str:
        """For people."""
        ...

    def connect(self, adopt: Callable[[socket.socket], None]) -> None:
        """Makes a connection that has proved itself, within its own deadline.

        adopt: to be given every socket before anything is waited for on it; the last one is the connection
        Raises KvrelayError or OSError.
        """
        ...

    def write(self, sock: socket.socket, job: PushJob) -> None:
        """Returns when the job's blocks may change again. Raises TransferError or OSError; the connection is over."""
        ...

    def disconnect(self) -> None:
        """The connection's socket has been closed: what else belonged to it goes too. Also when there was none."""
        ...


class Channel:
    """`run` is its thread; the other methods are called from the event loop."""

    def __init__(self, wire: Wire, options: PathOptions) -> None:
        self._wire = wire
        self._options = options
        self._changed = threading.Condition()
        self._queue: deque[PushJob] = deque()
        self._sock: socket.socket | None = None
        self._is_connected = False
        self._is_retired = False

    @property
    def address(self) -> str:
        return self._wire.address

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
        if self._is_connected and self._sock is not None and is_quiet(self._sock):
            return True
        self._disconnect()
        try:
            self._wire.connect(self._adopt)
        except TransferError as error:
            failure = error
        except KvrelayError as error:
            failure = TransferError(error.message)  # it names the address
        except OSError as error:
            failure = TransferError(f"{self.address}: no KV connection: {error}")
        else:
            self._is_connected = True
            return True
        self._disconnect()
        self._fail_queued(failure, was_reached=False)
        return False

    def _adopt(self, sock: socket.socket) -> None:
        """From here on `stop` reaches the socket; an earlier one is closed. Raises TransferError after `stop`."""
        with self._changed:
            if self._sock is not None:
                self._sock.close()
            self._sock = sock
            if self._is_retired:
                raise TransferError(f"{self.address}: the KV sender is closed")

    def _write_next(self) -> None:
        with self._changed:
            sock = self._sock
            if not self._queue or self._is_retired or sock is None:
                return  # withdrawn or stopped while we connected
            job = self._queue.popleft()
            job.state = PushState.WRITING
        began_s, num_waiting = time.monotonic(), 0
        error: TransferError | None = TransferError(f"{self.address}: the push did not come to its end")
        try:
            num_before = num_unacknowledged(sock)
            self._wire.write(sock, job)
            num_waiting = num_unacknowledged(sock) - num_before
            error = None
        except TransferError as failure:
            error = failure
        except OSError as broken:
            error = TransferError(f"{self.address}: the KV connection broke: {broken}")
        finally:
            with self._changed:
                job.state = PushState.OVER
            if error is not None:
                self._disconnect()
            job.finish(PushOutcome(time.monotonic() - began_s, error, began_s=began_s, num_waiting=num_waiting))

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
                self._shut_down()  # the peer has to know at once, also while a child that is just born has the file too
                self._sock.close()
                self._sock = None
        self._wire.disconnect()

    def _shut_down(self) -> None:
        if self._sock is not None:
            shut_down(self._sock)
