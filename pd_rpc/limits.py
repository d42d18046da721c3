"""Every bound and every wait of a connection. All peers of a cluster use the same values."""

from __future__ import annotations

import msgspec

KIB = 1024
MIB = 1024 * KIB


class RpcLimits(msgspec.Struct, frozen=True, kw_only=True):
    """
    max_body_bytes:         longest message body, sent or received
    max_hello_bytes:        the same before the peer has proved that it knows the secret
    handshake_s:            longest wait for a peer's whole handshake
    heartbeat_s:            a side that has sent nothing for so long sends a Ping
    silent_dead_s:          a peer from which nothing came for so long is lost
    max_calls:              calls being served at once on one connection; more are answered with Overloaded
    max_connections:        authenticated connections of one server
    max_unauthenticated:    connections of one server that are still in their handshake
    stream_credit:          items of one stream that may be on the way or waiting to be taken
    credit_wait_s:          how long a handler waits for a caller that takes no items
    write_high_water_bytes: unsent bytes from which on handlers and callers wait
    max_unsent_bytes:       unsent bytes from which on the peer is given up: it does not read
    linger_s:               how long a closed connection waits for the peer to read the reason
    """

    max_body_bytes: int = 16 * MIB
    max_hello_bytes: int = 64 * KIB
    handshake_s: float = 5.0
    heartbeat_s: float = 1.0
    silent_dead_s: float = 10.0
    max_calls: int = 1024
    max_connections: int = 256
    max_unauthenticated: int = 16
    stream_credit: int = 64
    credit_wait_s: float = 30.0
    write_high_water_bytes: int = 256 * KIB
    max_unsent_bytes: int = 20 * MIB
    linger_s: float = 0.5


DEFAULT_LIMITS = RpcLimits()

MAX_DEADLINE_S = 86_400.0
"""Longest deadline of a call: a day."""

MAX_CREDIT = 65_536
"""Most items that a caller may grant ahead."""

MAX_FRAME_ITEMS = 1024
"""Most items in one frame: what their reader makes of them is much more than their bytes."""
