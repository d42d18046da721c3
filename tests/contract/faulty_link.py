"""Between a sender and a receiver of blocks: passes whole frames on, and does to some what the worst network could.

    sender --> FaultyLink --> receiver         frames of every connection that there is: KVRP and KVRB
           <--            <--

A file that comes along with a message (SCM_RIGHTS) is passed on too. Threads, because blocking sockets are what stands
on either side; `close` ends them all.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable

from kv_transport.shm import socket_name
from pd_core.ticket import TransportAddress

RECEIVE_BYTES = 64 * 1024
HOLD_S = 0.02
"""A frame that is to come after the next one does not wait longer for it."""
LONGEST_DELAY_S = 0.02
_CONTROL = struct.Struct(">4sHII")
_DATA = struct.Struct(">4sHIII")


class Fault(enum.Enum):
    """What happens to one frame."""

    DELAY = "delay"  # in the middle of it
    SWAP = "swap"  # it arrives after the next one
    DUPLICATE = "duplicate"
    FLIP = "flip"  # of one bit, anywhere
    FLIP_HEAD = "flip head"  # of one bit, anywhere but in blocks
    TRUNCATE = "truncate"  # only its first part arrives, then the connection ends
    DROP = "drop"
    HANG_UP = "hang up"


class FrameFaults:
    """Draws the fate of frames. From any thread.

    rate: the part of frames that something happens to; 0 passes everything on
    """

    def __init__(self, generator: random.Random, kinds: list[Fault]) -> None:
        self.rate = 0.0
        self.counts: Counter[Fault] = Counter()
        self._generator = generator
        self._kinds = kinds
        self._lock = threading.Lock()

    def draw(self) -> tuple[Fault | None, float]:
        """What happens, and a number from 0 to 1 that says how, where or how long."""
        with self._lock:
            happens, kind = self._generator.random() < self.rate, self._generator.choice(self._kinds)
            if happens:
                self.counts[kind] += 1
            return kind if happens else None, self._generator.random()

    def draw_part(self) -> float:
        with self._lock:
            return self._generator.random()


class FaultyLink:
    """Where senders connect to instead of the receiver; `target`, where it is, may change."""

    def __init__(self, target: TransportAddress, faults: FrameFaults) -> None:
        self.target = target
        self._faults = faults
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        if target.path == "shm":
            self._listener = socket.socket(socket.AF_UNIX)
            self._host, self._port = f"@chaos-{os.getpid()}-{id(self)}", 0
            self._listener.bind(socket_name(self._host))
            self._listener.listen()
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._host, self._port = self._listener.getsockname()
        self._start(self._accept)

    @property
    def address(self) -> TransportAddress:
        return TransportAddress(self.target.path, self._host, self._port)

    def cut(self) -> None:
        """Ends every connection that there is now."""
        with self._lock:
            for sock in self._sockets:
                _shut_down(sock)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            _shut_down(self._listener)
        self.cut()
        while self._threads:
            self._threads.pop().join(10.0)
        self._listener.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="chaos-link", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                server = _connect(self.target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
                if self._is_closed:
                    _shut_down(client)
            self._start(self._relay, client, server)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._pump, args=(server, client), name="chaos-link-back", daemon=True)
        back.start()
        self._pump(client, server)
        back.join()
        with self._lock:
            self._sockets -= {client, server}
            client.close()
            server.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        """One direction, until its end, which is passed on too."""
        pump = _Pump(source, target, self._faults)
        try:
            while pump.pass_on():
                pass
        except OSError:
            pass  # one of the two ends is gone, so the other goes
        finally:
            pump.drop_files()
            _shut_down(target)
            _shut_down(source)


class _Pump:
    def __init__(self, source: socket.socket, target: socket.socket, faults: FrameFaults) -> None:
        self._source = source
        self._target = target
        self._faults = faults
        self._pending = b""
        self._held = b""
        self._files: list[int] = []
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)

    def pass_on(self) -> bool:
        """What comes next; False at the end. Raises OSError."""
        if self._held and not self._poll.poll(HOLD_S * 1000):
            self._let_held_go()
            return True
        if self._source.family == socket.AF_UNIX:
            data, files, _, _ = socket.recv_fds(self._source, RECEIVE_BYTES, 8)
            self._files += files
        else:
            data = self._source.recv(RECEIVE_BYTES)
        if not data:
            self._let_held_go()
            return False
        self._pending += data
        while length := _frame_bytes(self._pending):
            frame, self._pending = self._pending[:length], self._pending[length:]
            if not self._treat(frame):
                return False
        return True

    def drop_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _treat(self, frame: bytes) -> bool:
        """False when the connection is to end after it."""
        fault, size = self._faults.draw()
        held, self._held = self._held, b""
        match fault:
            case Fault.DELAY:
                middle = int(size * len(frame))
                self._send(frame[:middle])
                time.sleep(LONGEST_DELAY_S * self._faults.draw_part())
                self._send(frame[middle:])
            case Fault.SWAP:
                self._held = frame
            case Fault.DUPLICATE:
                self._send(frame)
                self._send(frame)
            case Fault.FLIP:
                self._send(_flipped(frame, size, len(frame)))
            case Fault.FLIP_HEAD:
                self._send(_flipped(frame, size, _head_bytes(frame)))
            case Fault.TRUNCATE:
                self._send(frame[: int(size * len(frame))])
            case Fault.DROP | Fault.HANG_UP:
                pass
            case None:
                self._send(frame)
        if fault is Fault.TRUNCATE:  # what came after it would be taken for its rest
            return False
        if held:
            self._send(held)
        return fault is not Fault.HANG_UP

    def _let_held_go(self) -> None:
        held, self._held = self._held, b""
        self._send(held)

    def _send(self, data: bytes) -> None:
        if self._files and data:
            sent = socket.send_fds(self._target, [data], self._files)
            self.drop_files()
            data = data[sent:]
        self._target.sendall(data)


def _frame_bytes(data: bytes) -> int:
    """Length of the frame that the bytes begin with; 0 when it is not whole."""
    if len(data) < _DATA.size:
        is_control = data[:4] == b"KVRP" and len(data) >= _CONTROL.size
        length = _CONTROL.size + _CONTROL.unpack_from(data)[2] if is_control else _DATA.size
    elif data[:4] == b"KVRB":
        _, _, num_header_bytes, num_block_bytes, _ = _DATA.unpack_from(data)
        length = _DATA.size + num_header_bytes + num_block_bytes
    else:
        length = _CONTROL.size + _CONTROL.unpack_from(data)[2]
    return length if len(data) >= length else 0


def _head_bytes(frame: bytes) -> int:
    """How many bytes of it are no block's."""
    return len(frame) - (_DATA.unpack_from(frame)[3] if frame[:4] == b"KVRB" else 0)


def _flipped(frame: bytes, where: float, num_bytes: int) -> bytes:
    bit = int(where * num_bytes * 8)
    damaged = bytearray(frame)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def _connect(target: TransportAddress) -> socket.socket:
    if target.path == "shm":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(socket_name(target.host))
        except OSError:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((target.host, target.port), timeout=5.0)
    sock.settimeout(None)
    return sock


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
