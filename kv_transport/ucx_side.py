"""One side of a pair over UCX: a context, a worker and an endpoint that nobody shares.

    made --> connected --> receives and sends --> closed
                             `-- settle: all complete, by force where it must be

Each pair has its own, so that a thread never waits for another's, no peer can reach another's receives, and whatever
is under way ends when the endpoint is closed by force: UCX then completes every request, also with a peer that was
stopped, and writes nothing after that. Belongs to one thread.
"""

from __future__ import annotations

import enum
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kv_transport.ucx_library import Request, UcxLibrary
from pd_core.errors import ProtocolError, TransferError

_log = logging.getLogger(__name__)

MAX_EVENTS = 64
"""Of UCX, between two looks at everything else."""
MAX_UNARMED = 32
"""In a row; from then on there is a pause between them."""
FORCED_S = 1.0
"""UCX completes requests of a closed endpoint within microseconds."""


class Woken(enum.Enum):
    """Why a wait is over."""

    DONE = "done"
    SOCKET = "socket"  # what was asked for is at the control connection
    SILENCE = "silence"  # UCX had nothing to do for too long


class UcxSide:
    """Raises TransferError when UCX cannot be started with these settings."""

    def __init__(self, library: UcxLibrary, settings: Mapping[str, str]) -> None:
        self._library = library
        self._endpoint: Any = None
        self._worker: Any = None
        try:
            self._context, self._worker = library.make_worker(settings)
        except (library.error, RuntimeError) as error:
            raise TransferError(f"UCX cannot be started: {error}") from error
        self._poll = select.poll()  # of UCX and the control connection
        self._ucx_poll = select.poll()
        for poll in (self._poll, self._ucx_poll):
            poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._sock: socket.socket | None = None
        self._num_unarmed = 0

    @property
    def address(self) -> bytes:
        """For the other side's `connect`."""
        return bytes(memoryview(self._worker.address))

    def connect(self, address: bytes, sock: socket.socket) -> None:
        """To the side with that address, whose control connection is `sock`. Returns before UCX has got through.

        Raises ProtocolError for bytes that are no address.
        """
        self._sock = sock
        self._poll.register(sock, 0)
        failure = self._reach(address)
        if failure is not None:
            raise ProtocolError(f"UCX cannot connect to that address: {failure}")

    def receive(self, into: memoryview, tag: int) -> Request:
        """The next message with that tag goes into the memory. Raises TransferError."""
        try:
            return self._worker.tag_recv(self._library.array(into), self._library.tag(tag))  # type: ignore[no-any-return]
        except self._library.error as error:
            raise TransferError(f"UCX: {error}") from error

    def send(self, data: memoryview, tag: int) -> Request:
        """Raises TransferError."""
        try:
            return self._endpoint.tag_send(self._library.array(data), self._library.tag(tag))  # type: ignore[no-any-return]
        except self._library.error as error:
            raise TransferError(f"UCX: {error}") from error

    def wait(self, is_done: Callable[[], bool], events: int, silence_s: float) -> Woken:
        """Lets UCX work until something has happened.

        events: what of the control connection ends the wait, as select.POLLRDHUP; its end always does
        silence_s: UCX may have nothing to do for so long
        Raises TransferError when UCX has lost the peer.
        """
        if self._sock is None:
            raise TransferError("UCX is not connected")
        self._poll.modify(self._sock, events)
        ends_s = time.monotonic() + silence_s
        while True:
            has_moved = self._progress()
            if is_done():
                return Woken.DONE
            self._check_alive()
            now_s = time.monotonic()
            if has_moved:
                ends_s = now_s + silence_s
            woken = self._poll.poll(0 if has_moved else self._sleep_ms(ends_s - now_s))
            if any(file == self._sock.fileno() for file, _ in woken):
                return Woken.SOCKET
            if now_s >= ends_s:
                return Woken.SILENCE

    def drain(self, requests: Sequence[Request], within_s: float) -> bool:
        """Lets UCX work until it is done with the memory of all requests; whether it is."""
        ends_s = time.monotonic() + within_s
        while not all_completed(requests) and (now_s := time.monotonic()) < ends_s:
            if not self._progress() and not all_completed(requests):
                self._ucx_poll.poll(self._sleep_ms(ends_s - now_s))
        return all_completed(requests)

    def settle(self, requests: Sequence[Request]) -> bool:
        """The same at once: where one is not complete the endpoint is closed, which completes what is under way, and
        receives that nothing has come for are cancelled."""
        if not all_completed(requests):
            self._force()
            for request in requests:
                self._library.cancel(request)
        return self.drain(requests, FORCED_S)

    def close(self) -> None:
        """Ends the endpoint by force and lets go of UCX; its memory and files go with the last request that is kept.

        May be called twice; nothing else may be called after it.
        """
        if self._endpoint is not None:
            self._force()
            # ucxx keeps requests that have failed until its own way to progress is called, or it is asked for them.
            self._worker.progress()
            self._library.forget_cancelled(self._endpoint)
        # By hand: an error that somebody keeps, with the frames that it came through, would keep them too.
        self._endpoint = self._worker = self._context = None

    def check(self, requests: Sequence[Request]) -> None:
        """Raises TransferError with what UCX says of the first that has failed."""
        failures = [failure for request in requests if (failure := self._failure(request)) is not None]
        if failures:
            raise TransferError(f"UCX: {failures[0]}")

    def _reach(self, address: bytes) -> str | None:
        """Why not. As a string: an error would keep the worker for as long as somebody keeps the error."""
        try:
            self._endpoint = self._library.make_endpoint(self._worker, address)
        except self._library.error as error:
            return str(error)
        return None

    def _failure(self, request: Request) -> str | None:
        try:
            request.check_error()
        except self._library.error as error:
            return str(error)
        return None

    def _force(self) -> None:
        if self._endpoint is not None:
            # Where it has failed by itself, UCX has closed it already, and this does nothing.
            self._endpoint.close_blocking()
            self._progress()

    def _progress(self) -> bool:
        """Whether UCX had something to do."""
        for num_events in range(MAX_EVENTS):
            if not self._worker.progress_once():
                return num_events > 0
        return True

    def _sleep_ms(self, left_s: float) -> int:
        """How long a poll may sleep that UCX's file is to wake; hardly, while UCX has something that it cannot tell."""
        if not self._worker.arm():
            self._num_unarmed += 1
            return 0 if self._num_unarmed < MAX_UNARMED else 1
        self._num_unarmed = 0
        return max(int(left_s * 1000) + 1, 0)  # rounded up: part of a millisecond would be no time at all

    def _check_alive(self) -> None:
        try:
            self._endpoint.raise_on_error()
        except self._library.error as error:
            raise TransferError(f"UCX has lost the peer: {error}") from error


def all_completed(requests: Iterable[Request]) -> bool:
    """Whether UCX touches the memory of none of them any more."""
    return all(request.completed for request in requests)
