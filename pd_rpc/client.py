"""RpcClient: one authenticated connection, many calls on it."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Sequence
from types import TracebackType, UnionType
from typing import Any, Union

import msgspec

from pd_core.errors import KvrelayError, ProtocolError, Unavailable
from pd_rpc.address import format_address, with_address
from pd_rpc.auth import CONTROL_KIND, NONCE_BYTES, Challenge, Side
from pd_rpc.client_core import CallEnded, CallFailed, ClientConnection, ItemsReceived
from pd_rpc.connection import ConnectionClosed, Event, Opened
from pd_rpc.handshake import CheckPeer
from pd_rpc.limits import DEFAULT_LIMITS, MAX_DEADLINE_S, RpcLimits
from pd_rpc.link import Link
from pd_rpc.stream import OpenStreams, RpcStream
from pd_rpc.tls import Tls
from pd_rpc.tls_protocol import TlsProtocol
from pd_rpc.wire import PeerIdentity

logger = logging.getLogger(__name__)

Replies = Sequence[type[msgspec.Struct]] | type[msgspec.Struct] | UnionType
"""The tagged Structs that may come back: a list of them, a union, or a single one."""

_UNARY_CREDIT = 2
"""One item more than allowed, so that a second answer is seen as a fault instead of waiting for credit."""


class RpcClient:
    """Made by `connect`; lives on the event loop that made it. Does not connect again: its owner decides that."""

    def __init__(
        self,
        core: ClientConnection,
        replies: Replies,
        identity: PeerIdentity,
        check_peer: CheckPeer | None,
    ) -> None:
        self._core = core
        self._identity = identity
        self._check_peer = check_peer
        self._loop = asyncio.get_running_loop()
        self._link = Link(core, self._admit, self._on_event, lambda: None)
        self._streams = OpenStreams(core, self._link, _decoder_of(replies))
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._closed_by: KvrelayError | None = None

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        identity: PeerIdentity,
        secret: bytes,
        replies: Replies,
        check_peer: CheckPeer | None = None,
        deadline_s: float = 5.0,
        limits: RpcLimits = DEFAULT_LIMITS,
        tls: Tls | None = None,
    ) -> RpcClient:
        """Connects, authenticates both ways and agrees with the peer to talk, all within `deadline_s`.

        tls: what both sides show each other before; without, everything can be read on the network
        Raises Unavailable (nobody there, mute, late), AuthenticationFailed (certificate or secret), ProtocolError (no
        peer of ours, or only one of us has TLS), Overloaded, or the error with which `check_peer` refused on either
        side. All name host:port.
        """
        loop = asyncio.get_running_loop()
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = Challenge(Side.CLIENT, secret, identity, nonce, kind=CONTROL_KIND)
        client = cls(ClientConnection(challenge, limits, loop.time()), replies, identity, check_peer)
        address = format_address(host, port)
        secured = TlsProtocol(client._link, tls.session(Side.CLIENT), limits.linger_s) if tls else None
        try:
            async with asyncio.timeout(deadline_s) as timeout:
                await loop.create_connection(lambda: secured or client._link, host, port)
                await client._opened
        except KvrelayError as error:
            await client._link.wait_lost()  # at most linger_s: the peer reads our reason
            failure = secured.failure if secured else None
            raise with_address(failure or error, address) from error
        except OSError as error:
            await client._abort()
            late = isinstance(error, TimeoutError) and timeout.expired()
            why = f"no handshake within {deadline_s:g} s" if late else f"cannot connect: {error}"
            raise Unavailable(f"{address}: {why}") from error
        except asyncio.CancelledError:
            await client._abort()
            raise
        return client

    @property
    def peer(self) -> PeerIdentity:
        """Who is on the other side, as it proved when we connected."""
        return self._core.require_peer()

    @property
    def silent_s(self) -> float:
        """How long nothing has come from the peer. Beyond 2 s it is suspect; at `silent_dead_s` it is closed."""
        return self._loop.time() - self._core.last_received_s

    @property
    def is_closed(self) -> bool:
        """Whether no call can be made any more."""
        return self._closed.is_set()

    @property
    def num_calls(self) -> int:
        """Calls that the server has not finished, given up ones among them."""
        return self._core.num_calls

    async def wait_closed(self) -> KvrelayError | None:
        """Waits, without a deadline, for the end of the connection; why it ended, None when one side was done."""
        await self._closed.wait()
        return self._closed_by

    async def call(self, body: msgspec.Struct, deadline_s: float) -> Any:
        """Sends a call and gives its one answer.

        Raises what the other side failed with, DeadlineExceeded, WorkerLost, PayloadTooLarge, or ProtocolError when
        there was no answer or more than one.
        """
        _check_deadline(deadline_s)
        name = type(body).__name__
        async with RpcStream(
            self._streams, body, deadline_s, credit=_UNARY_CREDIT, top_up_at=_UNARY_CREDIT + 1
        ) as items:
            answer = await anext(items, None)
            if answer is None or await anext(items, None) is not None:
                how_many = "no answer" if answer is None else "more than one answer"
                raise ProtocolError(f"{self.peer} gave {how_many} to {name}")
        return answer

    def stream(self, body: msgspec.Struct, deadline_s: float) -> RpcStream:
        """A call with any number of answers; see RpcStream."""
        _check_deadline(deadline_s)
        credit = self._core.limits.stream_credit
        return RpcStream(self._streams, body, deadline_s, credit=credit, top_up_at=max(1, credit // 2))

    async def close(self) -> None:
        """Closes the connection; open calls fail with WorkerLost. Returns within `linger_s`."""
        self._link.close(None)
        await self._link.wait_lost()

    async def __aenter__(self) -> RpcClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _admit(self, peer: PeerIdentity) -> None:
        if self._check_peer is not None:
            self._check_peer(self._identity, peer)

    def _on_event(self, event: Event) -> None:
        # Events of one chunk of bytes are made together: a stream may have ended with one before its last.
        match event:
            case ItemsReceived():  # first: nearly every event
                self._streams.put(event.items)
            case CallEnded() | CallFailed():
                if (stream := self._streams.by_id.get(event.call_id)) is not None:
                    stream.finish(event.error if isinstance(event, CallFailed) else None)
            case Opened():
                if not self._opened.done():
                    self._opened.set_result(None)
            case ConnectionClosed(error=error):
                self._on_closed(error)

    def _on_closed(self, error: KvrelayError | None) -> None:
        self._closed_by = error
        self._closed.set()
        if not self._opened.done():
            self._opened.set_exception(error or Unavailable("closed by the peer during the handshake"))
            return
        if error is not None:
            logger.warning("connection to %s at %s closed: %s", self._core.peer, self._link.address, error)
        self._streams.fail_all(f"{self._core.peer} at {self._link.address}: {error or 'connection closed'}")

    async def _abort(self) -> None:
        self._opened.cancel()
        if self._link.is_connected:
            self._link.abort()
            await self._link.wait_lost()


def _decoder_of(replies: Replies) -> msgspec.msgpack.Decoder[Any]:
    types = tuple(replies) if isinstance(replies, Sequence) else (replies,)
    return msgspec.msgpack.Decoder(Union[types])  # noqa: UP007 - made at run time


def _check_deadline(deadline_s: float) -> None:
    if math.isnan(deadline_s) or deadline_s > MAX_DEADLINE_S:
        raise ValueError(f"deadline of {deadline_s} s: at most {MAX_DEADLINE_S:g}")
