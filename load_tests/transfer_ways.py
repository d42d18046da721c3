"""What the transfer bench measures: ways to move KV, sizes, and who is compared with whom. Pure.

    ours                      its bare pair: what any program must do to move these bytes so
    shm, shm_no_digests       bare_shm     a shared pool, one memcpy a block, a doorbell for all of them
    tcp, tcp_no_digests       bare_socket  blocking sendmsg, and recv_into straight into place
    ucx, ucx_no_digests       bare_ucxx    a tag send and a tag receive for each block, with the same settings
                              bare_ucxx_polling   the same by two processes that never sleep; for comparison
    control_call              bare_call    a few bytes there and back over a blocking socket

The two halves of a way are in two processes; ways of one family share these, and so their memory.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pd_core.layout import BlockLayout

KIB = 1024
MIB = 1024 * KIB

Family = Literal["own", "ucx", "nixl", "mooncake"]


class Shape(msgspec.Struct, frozen=True):
    """So many blocks of so many bytes, moved at once."""

    name: str
    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


SMALL = Shape("64_kib", 1, 64 * KIB)
MANY = Shape("100_blocks", 100, 360 * KIB)
TRANSFER_SHAPES = (SMALL, Shape("1_mib", 1, MIB), Shape("64_mib", 1, 64 * MIB), MANY)
CALL = Shape("call", 1, 4 * KIB)
"""A control call moves no block; its pool is there because every half has one."""


class Way(msgspec.Struct, frozen=True):
    """
    timed_by:     whose clock says that all has arrived
    fills_target: whether the target has the source's blocks afterwards
    path:         of ours, None for others
    with_digests: both passes, the sender's and the receiver's, are in the measured time
    bare:         the way that it is compared with
    target:       least share of the bare pair's speed for MANY
    """

    name: str
    family: Family
    shapes: tuple[Shape, ...] = TRANSFER_SHAPES
    timed_by: Literal["source", "target"] = "target"
    fills_target: bool = True
    path: Literal["shm", "tcp", "ucx"] | None = None
    with_digests: bool = False
    bare: str | None = None
    target: float | None = None


WAYS = (
    Way("memcpy", "own", timed_by="source", fills_target=False),
    Way("bare_shm", "own"),
    Way("shm_no_digests", "own", path="shm", bare="bare_shm", target=0.9),
    Way("shm", "own", path="shm", with_digests=True, bare="bare_shm", target=0.6),
    Way("bare_socket", "own"),
    Way("tcp_no_digests", "own", path="tcp", bare="bare_socket", target=0.9),
    Way("tcp", "own", path="tcp", with_digests=True, bare="bare_socket", target=0.75),
    Way("bare_ucxx", "ucx"),
    Way("bare_ucxx_polling", "ucx"),
    Way("ucx_no_digests", "ucx", path="ucx", bare="bare_ucxx", target=0.9),
    Way("ucx", "ucx", path="ucx", with_digests=True, bare="bare_ucxx", target=0.9),
    Way("nixl", "nixl"),
    Way("mooncake", "mooncake", timed_by="source"),
    Way("bare_call", "own", shapes=(CALL,), timed_by="source", fills_target=False),
    Way("control_call", "own", shapes=(CALL,), timed_by="source", fills_target=False, bare="bare_call"),
)
FAMILIES: tuple[Family, ...] = ("own", "ucx", "nixl", "mooncake")


def way_named(name: str) -> Way:
    """Raises KeyError."""
    return {way.name: way for way in WAYS}[name]


def layout_of(shape: Shape) -> BlockLayout:
    """A layout whose blocks have the shape's bytes, a multiple of 32."""
    return BlockLayout("bench", shape.block_bytes // 32, num_kv_heads=1, head_dim=1, dtype="uint8")
