"""What the transfer bench and the process that receives say to each other: one line of JSON each way.

Begin : Started
Offer : Opened, and Arrived when all blocks are there
"""

from __future__ import annotations

import msgspec

from pd_core.layout import BlockLayout, Fingerprint
from pd_core.ticket import Ticket
from pd_rpc.wire import PeerIdentity

LAYOUT = BlockLayout("bench", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
"""Blocks of 360 KiB, as the embedded model's."""


class Begin(msgspec.Struct, frozen=True):
    """secret: what both sides prove to know; num_blocks: of the receiving pool"""

    incarnation: str
    secret: str
    num_blocks: int


class Started(msgspec.Struct, frozen=True):
    paths: list[str]


class Offer(msgspec.Struct, frozen=True):
    """So many blocks are about to be pushed over this path."""

    path: str
    num_blocks: int


class Opened(msgspec.Struct, frozen=True):
    ticket: Ticket


class Arrived(msgspec.Struct, frozen=True):
    """at_s: on Linux's monotonic clock, which all processes of a host share"""

    at_s: float


def identity_of(role: str, incarnation: str) -> PeerIdentity:
    return PeerIdentity(f"{role}-bench", role, incarnation, Fingerprint("bench", "bench", "bench", "bench", LAYOUT))
