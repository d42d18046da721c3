"""Path "tcp": bounds and waits, and what a connection is for. See docs/wire-format.md, "KV data connections"."""

from __future__ import annotations

from kv_transport.path_options import PathOptions

PATH = "tcp"
DATA_KIND = "kvrelay kv data"
"""`kind` of the handshake of KV data connections; a proof made for a control connection is wrong here."""

MIB = 1024 * 1024


class TcpOptions(PathOptions, frozen=True, kw_only=True):
    """
    max_frame_bytes:      most KV bytes in one frame (one block, if a block is larger)
    keepalive_s:          a silent connection is probed after so long
    socket_buffer_bytes:  0 leaves the size to the kernel, which adapts it; a fixed size ends that and is capped by
                          net.core.rmem_max and wmem_max
    """

    max_frame_bytes: int = 4 * MIB
    keepalive_s: float = 5.0
    socket_buffer_bytes: int = 0


DEFAULT_OPTIONS = TcpOptions()
