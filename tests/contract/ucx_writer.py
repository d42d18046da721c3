"""A sender over UCX, by hand: what it says and sends, and when, is up to the test."""

from __future__ import annotations

import select
import socket
import time

from transport_parts import FINGERPRINT, LAYOUT, SECRET, identity

from kv_transport.doorbell_frames import Attached, decode, encode
from kv_transport.ucx import CONTROL_KIND
from kv_transport.ucx_frames import FROM_RECEIVER, Answer, Attach, Doorbell, Ready, Welcome
from kv_transport.ucx_library import Request, load_ucx
from kv_transport.ucx_receiver import UcxBlockReceiver
from kv_transport.ucx_settings import ucx_settings
from kv_transport.ucx_side import UcxSide
from pd_core.layout import Fingerprint
from pd_core.ticket import TicketRef
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.frames import FrameReader

NONCE = b"sixteen bytes .."


class UcxWriter:
    """Blocks. `close` it."""

    def __init__(self, receiver: UcxBlockReceiver, fingerprint: Fingerprint | None = FINGERPRINT) -> None:
        address = receiver.addresses[0]
        self.sock = socket.create_connection((address.host, address.port), timeout=5)
        authenticate_blocking_as_client(
            self.sock, SECRET, identity("prefill", fingerprint), kind=CONTROL_KIND, deadline_s=5
        )
        self.side = UcxSide(load_ucx(), ucx_settings("127.0.0.1"))
        self.next_tag = 0
        self._is_connected = False
        self.requests: list[Request] = []
        self._last_number = 0
        self._frames = FrameReader(64 * 1024)
        self._kept: list[bytearray] = []

    def attach(self) -> UcxWriter:
        """Up to the first doorbell, as it should be."""
        welcome = self.ask_for_welcome()
        self.connect(welcome)
        self.send(NONCE, welcome.first_tag)
        assert self.answer() == Attached()
        self.next_tag = welcome.first_tag + 1
        return self

    def connect(self, welcome: Welcome) -> None:
        self.side.connect(welcome.address, self.sock)
        self._is_connected = True

    def ask_for_welcome(self) -> Welcome:
        self.sock.sendall(encode(Attach(1, LAYOUT.block_bytes, self.side.address, NONCE)))
        welcome = self.answer()
        assert isinstance(welcome, Welcome)
        return welcome

    def ring(self, ref: TicketRef, digests: list[int], num_blocks: int) -> Ready:
        """For so many blocks from the range's first on, without a block sent."""
        self._last_number += 1
        bell = Doorbell(self._last_number, ref, list(range(num_blocks)), digests, self.next_tag)
        self.next_tag += num_blocks
        self.sock.sendall(encode(bell))
        ready = self.answer()
        assert isinstance(ready, Ready)
        assert ready.number == bell.number
        return ready

    def send(self, block: bytes, tag: int) -> None:
        """UCX begins with it; `let_ucx_work` has it go on."""
        self._kept.append(bytearray(block))
        self.requests.append(self.side.send(memoryview(self._kept[-1]), tag))

    def let_ucx_work(self, within_s: float = 2.0) -> bool:
        """Whether all that was sent has gone."""
        return self.side.drain(self.requests, within_s)

    def answer(self) -> Answer:
        """What the receiver says next; UCX works meanwhile, also on what counts as sent already."""
        while (body := self._frames.next_body()) is None:
            if self._is_connected:
                self.side.wait(lambda: False, select.POLLIN | select.POLLRDHUP, 5.0)
            data = self.sock.recv(65536)
            assert data, "the receiver has hung up"
            self._frames.feed(data)
        return decode(FROM_RECEIVER, body)

    def rest(self) -> None:
        """A moment in which UCX works: late bytes get on their way."""
        ends_s = time.monotonic() + 0.02
        while time.monotonic() < ends_s:
            self.side.drain(self.requests, 0.005)

    def close(self) -> None:
        self.sock.close()
        self.side.drain(self.requests, 0.5)
        self.side.settle(self.requests)
        self.requests.clear()
        self.side.close()
