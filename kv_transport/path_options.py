"""Bounds and waits that every path over sockets has."""

from __future__ import annotations

import msgspec

from pd_core.config import MAX_KV_CONNECTIONS


class PathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All peers of a cluster use the same values.

    handshake_s:       longest wait for connect and handshake together, on either side
    max_connections:   connections of one receiver; more are closed at once
    frame_silence_s:   a writer from which nothing comes for so long in the middle of a frame is given up
    sender_idle_s:     a sender closes a connection that it has not used for so long
    receiver_idle_s:   the same for a receiver; longer, so that it is the sender who closes
    grace_s:           how long a writer may take to end its frame once its ticket is closed
    leave_s:           how long a thread may take to end once its socket is shut down
    max_queued_pushes: pushes to one destination that are waiting or being written; more wait in their callers
    withdraw_s:        how long a push that nobody wants any more may go on before its connection is cut
    unacknowledged_s:  a peer that has not acknowledged, or taken anything, for so long is given up
    """

    handshake_s: float = 5.0
    max_connections: int = MAX_KV_CONNECTIONS
    frame_silence_s: float = 5.0
    sender_idle_s: float = 60.0
    receiver_idle_s: float = 300.0
    grace_s: float = 0.5
    leave_s: float = 5.0
    max_queued_pushes: int = 64
    withdraw_s: float = 0.0
    unacknowledged_s: float = 10.0
