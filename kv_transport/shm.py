"""Path "shm": workers of one host, by shared memory. Bounds and waits, and what a connection is for.

    sender                                       receiver
    its pool, a sealed memfd  --SCM_RIGHTS-->    mapped read-only
    push: doorbell  --------------------------->  its own thread copies block by block into its own slots and
    our blocks may change  <---- taken ---------  takes the digest of each copy while it is hot in the cache

No process ever writes into another's pool, so that the permit of a ticket is about the receiver's own threads alone.
See docs/adr/0007-shm-by-pull.md, and docs/wire-format.md, "Shared-memory connections".
"""

from __future__ import annotations

from kv_transport.path_options import PathOptions

PATH = "shm"
DATA_KIND = "kvrelay kv shm"
"""`kind` of the handshake of these connections; a proof made for any other is wrong here."""


class ShmOptions(PathOptions, frozen=True, kw_only=True):
    """
    max_frame_blocks: most blocks that one doorbell names; what arrived is told after each
    """

    withdraw_s: float = 0.2
    max_frame_blocks: int = 128


DEFAULT_OPTIONS = ShmOptions()


def socket_name(host: str) -> str:
    """The abstract name that an address's host "@name" means."""
    return "\0" + host.removeprefix("@")
