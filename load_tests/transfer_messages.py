"""What the transfer bench and its two processes say to each other, one line of JSON each way. One question at a time.

               to the target             to the source
    first      Begin                     Begin
    a way      Open: Opened              Connect: Done
    a push     Receive: Ready, Arrived   Send: Sent
    a look     Inspect: Done

Anything may be answered with Refused. See transfer_process.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from load_tests.transfer_ways import Shape


class Begin(msgspec.Struct, frozen=True):
    """secret: what sender and receiver prove to know"""

    secret: str


class Open(msgspec.Struct, frozen=True, tag=True):
    """The target wipes the shape's pool and gets ready to be connected to."""

    way: str
    shape: Shape


class Opened(msgspec.Struct, frozen=True, tag=True):
    """offer: what the source has to know; only the two halves read it"""

    offer: str


class Connect(msgspec.Struct, frozen=True, tag=True):
    way: str
    shape: Shape
    offer: str


class Receive(msgspec.Struct, frozen=True, tag=True):
    way: str
    shape: Shape


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The target waits for the blocks. note: for the source's half"""

    note: str


class Send(msgspec.Struct, frozen=True, tag=True):
    way: str
    shape: Shape
    note: str


class Sent(msgspec.Struct, frozen=True, tag=True):
    """When the source began, and when its blocks could change again; on Linux's monotonic clock, which all processes
    of a host share."""

    began_s: float
    ended_s: float


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """When the last block was in its place, on the same clock."""

    at_s: float


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Refused unless the target's pool of this shape holds what the source's does."""

    shape: Shape


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    """In one line."""

    message: str


Question: TypeAlias = Open | Connect | Receive | Send | Inspect
Answer: TypeAlias = Opened | Ready | Sent | Arrived | Done | Refused
