"""Whose KV may go into whose pool; the same on every path between processes."""

from __future__ import annotations

from pd_core.errors import ConfigError, LayoutMismatch
from pd_core.layout import check_pairing
from pd_core.memory import BlockMemory
from pd_rpc.wire import PeerIdentity


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
