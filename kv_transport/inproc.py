"""Path "inproc": pools of one process and one event loop, joined by an explicit network, with faults on demand.

The same permits, digests, grace and events as every other path (see reception); only the wire is a copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from kv_transport.inproc_faults import NO_FAULTS, FaultPlan, FrameFaults
from kv_transport.interface import PushReceipt, ReceiverEvent
from kv_transport.landing import DirectLanding
from kv_transport.push_job import check_push
from kv_transport.reception import Reception
from pd_core.errors import DeadlineExceeded, InvalidTransition, ProtocolError, StaleTicket, TransferError
from pd_core.layout import Fingerprint, check_pairing
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket, TicketRef, TransportAddress

_log = logging.getLogger(__name__)

PATH = "inproc"
HOST = "inproc"
FRAME_BLOCKS = 8
MAX_LATE_FRAMES = 64


class InprocNetwork:
    """Who can be reached under which port. One for each test or process; nothing is global."""

    def __init__(self) -> None:
        self._receivers: dict[int, InprocBlockReceiver] = {}
        self._last_port = 0

    def attach(self, receiver: InprocBlockReceiver) -> int:
        """The receiver's port, never used before."""
        self._last_port += 1
        self._receivers[self._last_port] = receiver
        return self._last_port

    def detach(self, port: int) -> None:
        self._receivers.pop(port, None)

    def find(self, address: TransportAddress) -> InprocBlockReceiver:
        """Raises TransferError when nobody is there."""
        receiver = self._receivers.get(address.port)
        if receiver is None:
            raise TransferError(f"{address.host}:{address.port}: nobody is there")
        return receiver


class InprocBlockReceiver:
    """BlockReceiver of a pool in this process."""

    def __init__(
        self,
        network: InprocNetwork,
        memory: BlockMemory,
        fingerprint: Fingerprint,
        *,
        grace_s: float = 0.5,
        leave_s: float = 5.0,
    ) -> None:
        self._network = network
        self._grace_s = grace_s
        self._leave_s = leave_s
        self._port: int | None = None
        self._reception: Reception | None = None
        self.memory = memory
        self.fingerprint = fingerprint

    @property
    def addresses(self) -> list[TransportAddress]:
        """The one address; known after `start`."""
        if self._port is None:
            raise InvalidTransition("the receiver has not been started")
        return [TransportAddress(PATH, HOST, self._port)]

    @property
    def most_frame_blocks(self) -> None:
        return None

    @property
    def reception(self) -> Reception:
        """Permits and counters; for tests."""
        if self._reception is None:
            raise InvalidTransition("the receiver has not been started")
        return self._reception

    async def start(self) -> None:
        if self._reception is not None:
            raise InvalidTransition("the receiver has been started already")
        self._reception = Reception(
            self.memory, DirectLanding(self.memory), asyncio.get_running_loop(), self._grace_s, self._leave_s
        )
        self._port = self._network.attach(self)

    def open_ticket(self, ticket: Ticket, on_event: Callable[[ReceiverEvent], None]) -> None:
        self.reception.open_ticket(ticket, on_event)

    async def close_ticket(self, ref: TicketRef) -> None:
        await self.reception.close_ticket(ref)

    def counters(self) -> dict[str, float]:
        return self.reception.counters()

    async def close(self) -> None:
        if self._reception is None or self._port is None:
            return
        self._network.detach(self._port)
        await self._reception.close()


class WireFrame(msgspec.Struct, frozen=True):
    """A frame on its way: copies of the blocks, made when they left."""

    ref: TicketRef
    indices: list[int]
    digests: list[int]
    blocks: list[bytes]


class InprocWriter:
    """Writes one frame as a connection would: slowly if it must, and only until it is cut."""

    path = PATH

    def __init__(self, receiver: InprocBlockReceiver) -> None:
        self._receiver = receiver
        self._cut = asyncio.Event()
        self._cut_reason = ""

    def cut(self, reason: str) -> None:
        """See permits.Writer; called from the event loop."""
        self._cut_reason = self._cut_reason or reason
        self._cut.set()

    async def write(self, wire: WireFrame, faults: FrameFaults) -> None:
        """Returns when the frame has arrived or was stale. Raises TransferError when it was cut."""
        await self._pause(faults.delay_s)
        reception = self._receiver.reception
        try:
            frame = reception.begin_frame(wire.ref, wire.indices, wire.digests, self)
        except StaleTicket:
            return
        except ProtocolError as error:
            reception.writer_stopped(wire.ref, error.message)
            _log.warning("KV frame refused: %s", error)
            raise TransferError(f"{HOST}: the receiver objects: {error.message}") from error
        num_bytes = 0
        reason = "cancelled"
        try:
            num_bytes = await self._fill(frame.slots, _damaged(wire.blocks, faults.flipped_bit), faults)
            reason = self._cut_reason or "the connection ended"
        finally:
            block_bytes = self._receiver.memory.block_bytes
            reception.end_frame(frame, num_bytes // block_bytes)
            if num_bytes < block_bytes * len(wire.blocks):
                reception.writer_stopped(wire.ref, f"stopped in the middle of a frame: {reason}")
        if num_bytes < block_bytes * len(wire.blocks):
            raise TransferError(f"{HOST}: the connection broke: {reason}")

    async def _fill(self, slots: Sequence[int | None], blocks: Sequence[bytes], faults: FrameFaults) -> int:
        """Writes up to where the faults or a cut end it; how many bytes that were."""
        block_bytes = len(blocks[0])
        ends = [end for end in (faults.cut_at, faults.truncated_at) if end is not None]
        last = int(min(ends, default=1.0) * len(blocks) * block_bytes)
        middle = len(blocks) // 2 * block_bytes + block_bytes // 2
        if faults.stall_s and middle < last:
            self._copy(slots, blocks, 0, middle)
            await self._pause(faults.stall_s)
            if self._cut.is_set():
                return middle
            self._copy(slots, blocks, middle, last)
        else:
            self._copy(slots, blocks, 0, last)
        return last

    def _copy(self, slots: Sequence[int | None], blocks: Sequence[bytes], first: int, last: int) -> None:
        """Bytes first .. last - 1 of the frame into their slots."""
        for position, (slot, block) in enumerate(zip(slots, blocks, strict=True)):
            begin = max(first - position * len(block), 0)
            end = min(last - position * len(block), len(block))
            if slot is not None and begin < end:
                self._receiver.memory.block(slot)[begin:end] = block[begin:end]

    async def _pause(self, duration_s: float) -> None:
        if not duration_s:
            return
        try:
            async with asyncio.timeout(duration_s):
                await self._cut.wait()
        except TimeoutError:
            return


class InprocBlockSender:
    """BlockSender of a pool in this process."""

    def __init__(
        self,
        network: InprocNetwork,
        memory: BlockMemory,
        fingerprint: Fingerprint,
        *,
        faults: FaultPlan | None = None,
    ) -> None:
        self._network = network
        self._memory = memory
        self._fingerprint = fingerprint
        self._faults = faults
        self._late: set[asyncio.Task[None]] = set()
        self._pushes: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def push(
        self,
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> PushReceipt:
        """See BlockSender.push. Raises LayoutMismatch when the receiver keeps other KV than we make."""
        check_push(self._memory, ticket, indices, block_ids, digests)
        address = next((address for address in ticket.addresses if address.path == PATH), None)
        if address is None:
            raise TransferError(f"ticket {ticket.ref.ticket_id} has no inproc address")
        if self._is_closed:
            raise TransferError("the KV sender is closed")
        receiver = self._network.find(address)
        check_pairing(self._fingerprint, receiver.fingerprint)
        started_s = asyncio.get_running_loop().time()
        task = asyncio.ensure_future(self._send(receiver, ticket.ref, indices, block_ids, digests))
        self._pushes.add(task)
        try:
            async with asyncio.timeout(deadline_s):
                await _until_done(task)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{HOST}: {len(indices)} blocks were not sent within {deadline_s:g} s") from error
        finally:
            self._pushes.discard(task)
        seconds = asyncio.get_running_loop().time() - started_s
        return PushReceipt(PATH, len(indices) * self._memory.block_bytes, seconds)

    def path_to(self, incarnation: str) -> str:
        return PATH

    async def close(self) -> None:
        """Pushes that run fail with TransferError; late frames never arrive."""
        self._is_closed = True
        tasks = [*self._late, *self._pushes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(
        self,
        receiver: InprocBlockReceiver,
        ref: TicketRef,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
    ) -> None:
        for first in range(0, len(indices), FRAME_BLOCKS):
            part = slice(first, first + FRAME_BLOCKS)
            blocks = [bytes(self._memory.block(block_id)) for block_id in block_ids[part]]
            wire = WireFrame(ref, list(indices[part]), list(digests[part]), blocks)
            faults = self._faults.draw(sum(map(len, blocks))) if self._faults else NO_FAULTS
            if faults.is_duplicated:
                self._send_late(receiver, wire, NO_FAULTS)
            if faults.is_late:
                self._send_late(receiver, wire, faults)
            else:
                await _carry(receiver, wire, faults)

    def _send_late(self, receiver: InprocBlockReceiver, wire: WireFrame, faults: FrameFaults) -> None:
        if len(self._late) >= MAX_LATE_FRAMES or self._faults is None:
            raise TransferError(f"{HOST}: {len(self._late)} frames are late already")
        task = asyncio.ensure_future(self._carry_late(receiver, wire, faults, self._faults.delay_s))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _carry_late(
        self, receiver: InprocBlockReceiver, wire: WireFrame, faults: FrameFaults, late_s: float
    ) -> None:
        await asyncio.sleep(late_s)
        try:
            await _carry(receiver, wire, faults)
        except TransferError:
            return  # the receiver knows; a sender whose bytes have left never does


async def _carry(receiver: InprocBlockReceiver, wire: WireFrame, faults: FrameFaults) -> None:
    """Brings a frame to the receiver. A frame that the sender believes to have left whole raises nothing."""
    try:
        await InprocWriter(receiver).write(wire, faults)
    except TransferError:
        if faults.truncated_at is None or faults.cut_at is not None:
            raise


async def _until_done(task: asyncio.Task[None]) -> None:
    """The result of the task. Cancelled, it stops the task first, and returns when it has stopped."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if task.cancelled():
        raise TransferError("the KV sender is closed")
    task.result()


def _damaged(blocks: Sequence[bytes], flipped_bit: int | None) -> Sequence[bytes]:
    if flipped_bit is None:
        return blocks
    byte, bit = divmod(flipped_bit, 8)
    position, offset = divmod(byte, len(blocks[0]))
    damaged = bytearray(blocks[position])
    damaged[offset] ^= 1 << bit
    return [*blocks[:position], bytes(damaged), *blocks[position + 1 :]]
