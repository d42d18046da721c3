"""TLS on an asyncio connection: stands between the transport and the protocol that knows nothing of it.

transport <-- bytes of the network --> TlsProtocol <-- bytes of ours --> the protocol inside, which has a TlsTransport

asyncio's own TLS does not do: its transports cannot end one direction, which is how we say why we leave; it tells the
protocol inside nothing of a connection that fails before it is open, and its waits are others than ours. Here the
protocol inside is told of a connection at once, so its deadlines and its bounds hold from the first byte on.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pd_core.errors import KvrelayError
from pd_rpc.tls_session import TlsSession


class TlsProtocol(asyncio.Protocol):
    """inside:   whose connection it is; what it sends before both agree on keys waits until they do
    linger_s: how long a peer may take to read why TLS has failed
    """

    def __init__(self, inside: asyncio.Protocol, session: TlsSession, linger_s: float) -> None:
        self._inside = inside
        self._session = session
        self._linger_s = linger_s
        self._transport: asyncio.Transport | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._unsent = bytearray()
        self._must_end = False
        self.failure: KvrelayError | None = None
        """Why TLS is over, once it is: AuthenticationFailed or ProtocolError."""

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._session.start()
        self._send()
        self._inside.connection_made(TlsTransport(self, self._transport))

    def data_received(self, data: bytes) -> None:
        if self.failure is not None:
            return  # it may still write, and should find the way clear until it has read why
        try:
            was_open = self._session.is_open
            self._session.feed(data)
            if self._session.is_open and not was_open:
                self._on_open()
            plain = self._session.read()
        except KvrelayError as error:
            self._fail(error)
            return
        self._send()
        if plain:
            self._inside.data_received(plain)
        if self._session.is_ended:
            self.eof_received()

    def eof_received(self) -> bool:
        if self.failure is None:
            self._inside.eof_received()
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._inside.connection_lost(self.failure or exc)

    def pause_writing(self) -> None:
        self._inside.pause_writing()

    def resume_writing(self) -> None:
        self._inside.resume_writing()

    # what the protocol inside calls, by way of its TlsTransport

    @property
    def num_unsent_bytes(self) -> int:
        """What waits for keys."""
        return len(self._unsent)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.failure is not None:
            return
        if not self._session.is_open:
            self._unsent += data
            return
        self._session.write(bytes(data))
        self._send()

    def write_eof(self) -> None:
        """Nothing will be sent behind what was written, which the peer is to read first."""
        self._must_end = True
        if self._session.is_open or self.failure is not None:
            self._end()

    # inside

    def _on_open(self) -> None:
        self._session.write(bytes(self._unsent))
        self._unsent.clear()
        self._send()
        if self._must_end:
            self._end()

    def _fail(self, error: KvrelayError) -> None:
        """Tells the peer, and waits until it has read that, but not for long."""
        self.failure = error
        self._unsent.clear()
        self._send()
        self._end()
        if self._transport is not None:
            loop = asyncio.get_running_loop()
            self._abort_timer = loop.call_later(self._linger_s, self._transport.abort)

    def _send(self) -> None:
        data = self._session.take_outgoing()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _end(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # reset by the peer, which the transport has not noticed yet
            self._transport.abort()


class TlsTransport(asyncio.Transport):
    """The transport of the protocol inside."""

    def __init__(self, protocol: TlsProtocol, transport: asyncio.Transport) -> None:
        super().__init__()
        self._protocol = protocol
        self._transport = transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._protocol.write(data)

    def write_eof(self) -> None:
        self._protocol.write_eof()

    def can_write_eof(self) -> bool:
        return True

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + self._protocol.num_unsent_bytes

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
