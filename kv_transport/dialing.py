"""Internet sockets by name and port: listening at one address, connecting to the first that answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kv_transport.sockets import left_s
from kv_transport.writer_acceptor import BACKLOG
from pd_core.errors import ConfigError
from pd_rpc.address import format_address


async def listen_on(
    host: str, port: int, prepare: Callable[[socket.socket], None] = lambda sock: None
) -> socket.socket:
    """A listening socket that does not block, on this address and no other; port 0 takes a free one.

    prepare: given the socket before it is bound
    Raises ConfigError naming host:port when that cannot be.
    """
    address = format_address(host, port)
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = infos[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"KV receiver cannot listen on {address}: {error}") from error
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        prepare(listener)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"KV receiver cannot listen on {address}: {error}") from error
    return listener


def connect_to(
    host: str, port: int, make_socket: Callable[[int, int, int], socket.socket], ends_s: float
) -> socket.socket:
    """Connects one socket after the other to what the name resolves to, until one is.

    make_socket: of family, type and protocol
    ends_s:      of time.monotonic
    Raises OSError with what the last one failed with.
    """
    failure: OSError = TimeoutError("no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = make_socket(family, kind, protocol)
        try:
            sock.settimeout(left_s(ends_s))
            sock.connect(where)
        except OSError as error:
            failure = error
        else:
            return sock
    raise failure
