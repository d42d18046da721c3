"""Two real endpoints of every path, and everything that can happen to them, in any order: see transport_world.

A few dozen rounds here; a thousand over each path by `make chaos`, with another seed each time. A failure names it.
"""

import random
import secrets
import time

import msgspec
import pytest
from transport_parts import (
    FINGERPRINT,
    OPTIONS,
    SECRET,
    SHM_OPTIONS,
    UCX_OPTIONS,
    identity,
    num_open_files,
    num_pool_maps,
    transport_threads,
)
from transport_world import World

from kv_transport.inproc import InprocBlockReceiver, InprocBlockSender, InprocNetwork
from kv_transport.inproc_faults import FaultPlan
from kv_transport.shm_pool import copy_block
from kv_transport.shm_receiver import ShmBlockReceiver
from kv_transport.shm_sender import ShmBlockSender
from kv_transport.stripes import FixedStripes
from kv_transport.tcp_receiver import TcpBlockReceiver
from kv_transport.tcp_sender import TcpBlockSender
from kv_transport.ucx_receiver import UcxBlockReceiver
from kv_transport.ucx_sender import UcxBlockSender

IMPATIENT = {"handshake_s": 0.5, "frame_silence_s": 0.3, "grace_s": 0.05, "unacknowledged_s": 1.0}


class TcpEnds:
    path = "tcp"
    has_link = True
    options = msgspec.structs.replace(OPTIONS, **IMPATIENT, socket_buffer_bytes=16 * 1024)

    def make_receiver(self, memory, incarnation):
        who = msgspec.structs.replace(identity("decode"), incarnation=incarnation)
        return TcpBlockReceiver(memory, who, SECRET, host="127.0.0.1", options=self.options)

    def make_sender(self, memory):
        return TcpBlockSender(memory, identity("prefill"), SECRET, options=self.options)

    def set_faults(self, rate):
        """The link has them."""


class ThreeStripes(FixedStripes):
    """However small a push is."""

    def choose(self, num_blocks, num_bytes, now_s):
        return min(3, num_blocks)


class StripedTcpEnds(TcpEnds):
    def make_sender(self, memory):
        sender = super().make_sender(memory)
        sender._make_plan = lambda: ThreeStripes(3)
        return sender


class ShmEnds(TcpEnds):
    path = "shm"
    options = msgspec.structs.replace(SHM_OPTIONS, **IMPATIENT, withdraw_s=0.003)

    def make_receiver(self, memory, incarnation):
        who = msgspec.structs.replace(identity("decode"), incarnation=incarnation)
        return ShmBlockReceiver(memory, who, SECRET, options=self.options, copy=copy_slowly)

    def make_sender(self, memory):
        return ShmBlockSender(memory, identity("prefill"), SECRET, options=self.options)


class UcxEnds(TcpEnds):
    """What is led through the link is what both sides say to each other; the blocks go by UCX's own ways."""

    path = "ucx"
    options = msgspec.structs.replace(UCX_OPTIONS, **IMPATIENT)

    def make_receiver(self, memory, incarnation):
        who = msgspec.structs.replace(identity("decode"), incarnation=incarnation)
        return UcxBlockReceiver(memory, who, SECRET, host="127.0.0.1", options=self.options)

    def make_sender(self, memory):
        return UcxBlockSender(memory, identity("prefill"), SECRET, host="127.0.0.1", options=self.options)


class InprocEnds:
    path = "inproc"
    has_link = False

    def __init__(self):
        self.network = InprocNetwork()
        self.set_faults(0.0)
        self.has_flips = True

    def make_receiver(self, memory, incarnation):
        return InprocBlockReceiver(self.network, memory, FINGERPRINT, grace_s=0.05)

    def make_sender(self, memory):
        return InprocBlockSender(self.network, memory, FINGERPRINT, faults=self)

    def set_faults(self, rate):
        kinds = ("delay", "stall", "cut", "duplicate", "reorder", "truncate")
        rates = dict.fromkeys(kinds, rate / 2) | {"corrupt": rate / 2 if getattr(self, "has_flips", True) else 0.0}
        self.plan = FaultPlan(random.Random(rate), **rates, delay_s=0.003, stall_s=0.002)
        self.delay_s = self.plan.delay_s

    def draw(self, num_bytes):
        return self.plan.draw(num_bytes)


def copy_slowly(source, into):
    """Half of a block is there for a moment, so that much happens in the middle of one."""
    half = len(into) // 2
    copy_block(source[:half], into[:half])
    time.sleep(0.0005)
    copy_block(source[half:], into[half:])


WORLDS = {
    "tcp": lambda seed: World(TcpEnds(), seed, with_digests=True),
    "tcp without digests": lambda seed: World(TcpEnds(), seed, with_digests=False),
    "tcp over three connections": lambda seed: World(StripedTcpEnds(), seed, with_digests=seed % 2 == 0),
    "shm": lambda seed: World(ShmEnds(), seed, with_digests=True),
    # No frame of a socket of the kernel's can be late after its end: what such a ticket rests on.
    "shm without digests": lambda seed: World(ShmEnds(), seed, with_digests=False, is_direct=True),
    "ucx": lambda seed: World(UcxEnds(), seed, with_digests=True),
    "ucx without digests": lambda seed: World(UcxEnds(), seed, with_digests=False),
    "inproc": lambda seed: World(InprocEnds(), seed, with_digests=True),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(
    ("num_rounds", "seed"),
    [(50, 1), pytest.param(1000, None, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["50 rounds", "1000 rounds"],
)
async def test_whatever_happens_a_block_equals_its_source_or_is_missing_and_nothing_is_left(name, num_rounds, seed):
    num_files, num_maps = num_open_files(), num_pool_maps()
    world = WORLDS[name](secrets.randbits(32) if seed is None else seed)
    await world.run(num_rounds)
    assert world.counts["committed"] >= num_rounds / 50, world.counts
    assert world.counts["push done"] >= num_rounds / 10, world.counts
    assert world.counts["push cancelled"] + world.counts["push failed"] >= num_rounds / 50, world.counts
    assert not world.has_link or sum(world.faults.counts.values()) >= num_rounds / 50, world.faults.counts
    assert transport_threads() == []
    assert num_open_files() <= num_files
    assert num_pool_maps() <= num_maps
