"""Our own paths between the bench's processes: the very senders and receivers that a worker makes of its config.

The sender's digests are made within the measured time, where the way has digests: each when its block is about to be
sent.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import msgspec

from kv_transport import ucx
from kv_transport.choice import RoutedSender
from kv_transport.digest import BlockDigests
from kv_transport.interface import BlockReceiver, BlocksArrived, BlockSender, ReceiverEvent
from kv_transport.paths import make_receiver, make_sender
from kv_transport.receiver import PoolReceiver
from kv_transport.ucx_receiver import UcxListener
from kv_transport.ucx_sender import UcxBlockSender
from load_tests.transfer_halves import HOST, PUSH_S, Pool
from load_tests.transfer_messages import Sent
from load_tests.transfer_ways import Shape, Way, layout_of
from pd_core.config import TransferConfig
from pd_core.errors import TransferError
from pd_core.layout import Fingerprint
from pd_core.ticket import Ticket, TicketRef
from pd_rpc.wire import PeerIdentity

LEASE_S = 60.0
INCARNATION = "bench-target"


class OwnSource:
    """SourceHalf."""

    def __init__(self, way: Way, pool: Pool, secret: bytes) -> None:
        self._with_digests = way.with_digests
        self._pool = pool
        self._places = list(range(pool.shape.num_blocks))
        identity = identity_of("prefill", "bench-source", pool.shape)
        self._sender = _make_sender(way, pool, identity, secret)

    async def connect(self, offer: str) -> None:
        """The first push connects."""

    async def send(self, note: str) -> Sent:
        ticket = msgspec.json.decode(note, type=Ticket)
        began_s = time.monotonic()
        digests = BlockDigests(self._pool.blocks, self._places) if self._with_digests else []
        await self._sender.push(ticket, self._places, self._places, digests, PUSH_S)
        return Sent(began_s, time.monotonic())

    async def close(self) -> None:
        await self._sender.close()


class OwnTarget:
    """TargetHalf: a decode worker's receiving side and nothing else."""

    def __init__(self, way: Way, pool: Pool, secret: bytes) -> None:
        self._with_digests = way.with_digests
        self._num_blocks = pool.shape.num_blocks
        identity = identity_of("decode", INCARNATION, pool.shape)
        self._receiver = _make_receiver(way, pool, identity, secret)
        self._epoch = 0

    async def open(self) -> str:
        await self._receiver.start()
        return ""

    async def receive(self, say_ready: Callable[[str], None]) -> float:
        """Raises TransferError when a block came wrong or its writer left, TimeoutError."""
        ticket = self._ticket()
        missing = set(range(self._num_blocks))
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def on_event(event: ReceiverEvent) -> None:
            if done.done():
                return  # it has failed already
            if not isinstance(event, BlocksArrived) or event.corrupt:
                done.set_exception(TransferError(f"a transfer of the bench failed: {event}"))
                return
            missing.difference_update(event.verified)
            if not missing:
                done.set_result(time.monotonic())

        self._receiver.open_ticket(ticket, on_event)
        try:
            say_ready(msgspec.json.encode(ticket).decode())
            async with asyncio.timeout(PUSH_S):
                return await done
        finally:
            await self._receiver.close_ticket(ticket.ref)

    async def close(self) -> None:
        await self._receiver.close()

    def _ticket(self) -> Ticket:
        self._epoch += 1
        return Ticket(
            ref=TicketRef(secrets.token_hex(8), INCARNATION, self._epoch, 1),
            request_id=f"bench-{self._epoch}",
            first_block=0,
            block_ids=list(range(self._num_blocks)),
            lease_s=LEASE_S,
            control_host=HOST,
            control_port=0,
            addresses=self._receiver.addresses,
            with_digests=self._with_digests,
        )


def config_of(way: Way) -> TransferConfig:
    """What makes a worker use this way alone."""
    if way.path is None:
        raise ValueError(f"{way.name} is no path of ours")
    return TransferConfig(host=HOST, path=way.path, digests=way.with_digests)


def _make_sender(way: Way, pool: Pool, identity: PeerIdentity, secret: bytes) -> BlockSender:
    if way.path == ucx.PATH:  # not probed first: its processes have nothing to lose but the figures
        return RoutedSender({ucx.PATH: UcxBlockSender(pool.memory, identity, secret, host=HOST)})
    return make_sender(pool.memory, identity, secret, config_of(way))


def _make_receiver(way: Way, pool: Pool, identity: PeerIdentity, secret: bytes) -> BlockReceiver:
    if way.path == ucx.PATH:  # as above
        return PoolReceiver(pool.memory, [UcxListener(pool.memory, identity, secret, host=HOST)])
    return make_receiver(pool.memory, identity, secret, config_of(way))


def identity_of(role: str, incarnation: str, shape: Shape) -> PeerIdentity:
    fingerprint = Fingerprint("bench", "bench", "bench", "bench", layout_of(shape))
    return PeerIdentity(f"{role}-bench", role, incarnation, fingerprint)
