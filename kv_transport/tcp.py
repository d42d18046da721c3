"""Path "tcp": bounds and waits, and what a connection is for. See docs/wire-format.md, "KV data connections"."""

from __future__ import annotations

import msgspec

from pd_core.errors import ConfigError, LayoutMismatch
from pd_core.layout import check_pairing
from pd_core.memory import BlockMemory
from pd_rpc.wire import PeerIdentity

PATH = "tcp"
DATA_KIND = "kvrelay kv data"
"""`kind` of the handshake of KV data connections; a proof made for a control connection is wrong here."""

MIB = 1024 * 1024


class TcpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All peers of a cluster use the same values.

    handshake_s:          longest wait for connect and handshake together, on either side
    max_connections:      connections of one receiver; more are closed at once
    max_frame_bytes:      most KV bytes in one frame (one block, if a block is larger)
    frame_silence_s:      a writer from which nothing comes for so long in the middle of a frame is given up
    sender_idle_s:        a sender closes a connection that it has not used for so long
    receiver_idle_s:      the same for a receiver; longer, so that it is the sender who closes
    grace_s:              how long a writer may take to end its frame once its ticket is closed
    leave_s:              how long a thread may take to end once its socket is shut down
    max_queued_pushes:    pushes to one destination that are waiting or being written; more wait in their callers
    unacknowledged_s:     a peer that has not acknowledged bytes, or taken any, for so long is given up by the kernel
    keepalive_s:          a silent connection is probed after so long
    socket_buffer_bytes:  0 leaves the size to the kernel, which adapts it; a fixed size ends that and is capped by
                          net.core.rmem_max and wmem_max
    """

    handshake_s: float = 5.0
    max_connections: int = 64
    max_frame_bytes: int = 4 * MIB
    frame_silence_s: float = 5.0
    sender_idle_s: float = 60.0
    receiver_idle_s: float = 300.0
    grace_s: float = 0.5
    leave_s: float = 5.0
    max_queued_pushes: int = 64
    unacknowledged_s: float = 10.0
    keepalive_s: float = 5.0
    socket_buffer_bytes: int = 0


DEFAULT_OPTIONS = TcpOptions()


def check_identity(memory: BlockMemory, identity: PeerIdentity) -> None:
    """Raises ConfigError unless `identity` says what the blocks of `memory` hold."""
    if identity.fingerprint is None:
        raise ConfigError(f"{identity} has KV blocks but no fingerprint")
    layout_bytes = identity.fingerprint.layout.block_bytes
    if layout_bytes != memory.block_bytes:
        raise ConfigError(f"{identity}: a block has {memory.block_bytes} bytes, its layout says {layout_bytes}")


def check_peer(ours: PeerIdentity, theirs: PeerIdentity) -> None:
    """Raises LayoutMismatch naming both values unless the two make and keep the same KV."""
    if ours.fingerprint is None or theirs.fingerprint is None:
        raise LayoutMismatch(f"{theirs if ours.fingerprint else ours} keeps no KV: it has no fingerprint")
    check_pairing(ours.fingerprint, theirs.fingerprint)
