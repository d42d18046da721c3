"""A model of what may never happen between two pools, whatever does happen to the way between them.

Rounds of one operation each, drawn from a seed: tickets are issued, pushed to, taken back and committed, pushes are
cancelled, connections are cut, both sides start anew. Every block of a ticket has one right content; what the sender
sends it puts into its own blocks first, and *spoils the moment the push has returned*, as the next request would. So
whoever reads too late, or writes too late, makes a difference that shows. There are two senders, so that two can be
inside one ticket.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from faulty_link import Fault, FaultyLink, FrameFaults
from transport_parts import LAYOUT, Arrivals, SharedMemory

from kv_transport.digest import block_digest
from kv_transport.interface import BlockSender
from pd_core.errors import DeadlineExceeded, TransferError
from pd_core.ledger import BlockLedger
from pd_core.ticket import Ticket, TicketRef, TransportAddress

NUM_BLOCKS = 40
MAX_TICKET_BLOCKS = 10
ROUGH = 0.12
"""The part of frames that something happens to."""
HANG_S = 15.0
"""Nothing takes so long; deadlines are far below, machines may be busy."""
CANCEL_S = 0.006


class Ends(Protocol):
    """How one path makes its two sides.

    has_link: whether what they say can be led through a FaultyLink
    """

    path: str
    has_link: bool

    def make_receiver(self, memory: SharedMemory, incarnation: str) -> Any: ...

    def make_sender(self, memory: SharedMemory) -> BlockSender: ...

    def set_faults(self, rate: float) -> None:
        """For a path whose faults are its own."""
        ...


class OpenTicket:
    """A ticket, the right content of its blocks, and what has come."""

    def __init__(self, ticket: Ticket, contents: list[bytes]) -> None:
        self.ticket = ticket
        self.contents = contents
        self.digests = [block_digest(memoryview(content)) for content in contents]
        self.arrivals = Arrivals()

    @property
    def missing(self) -> list[int]:
        verified = self.arrivals.verified
        return [index for index in range(self.ticket.num_blocks) if index not in verified]


class World:
    """Two pools, their ledgers, and the tickets between them. `counts`: how often what happened."""

    def __init__(self, ends: Ends, seed: int, *, with_digests: bool, is_direct: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self._ends = ends
        self._seed = seed
        self._with_digests = with_digests
        self._random = random.Random(seed)
        self._source = SharedMemory(NUM_BLOCKS, LAYOUT.block_bytes)
        self._target = SharedMemory(NUM_BLOCKS, LAYOUT.block_bytes)
        self._sending = BlockLedger(NUM_BLOCKS, "sender")
        kinds = [kind for kind in Fault if kind is not (Fault.FLIP_HEAD if with_digests else Fault.FLIP)]
        often = [Fault.DELAY] * len(kinds)  # somebody who is in the middle of a frame is what most rules are about
        self.faults = FrameFaults(random.Random(f"faults {seed}"), kinds + often)
        self._is_direct = is_direct or not ends.has_link
        self._link: FaultyLink | None = None
        self._boots = itertools.count(1)
        self._names = itertools.count(1)
        self._open: list[OpenTicket] = []
        self._past: list[OpenTicket] = []
        self._holders: dict[str, list[int]] = {}
        self._still: dict[int, bytes] = {}
        self._pushes: set[asyncio.Task[None]] = set()
        self._story: list[str] = []

    @property
    def has_link(self) -> bool:
        return not self._is_direct

    async def run(self, num_rounds: int) -> None:
        """Raises AssertionError, with the seed, when what must hold does not."""
        await self._start_receiver()
        self._set_rate(ROUGH)
        self._senders = [self._ends.make_sender(self._source) for _ in range(2)]
        try:
            for _ in range(num_rounds):
                await self._one_round()
            await self._end()
        except Exception as error:
            raise AssertionError(f"seed {self._seed}, after {' '.join(self._story[-12:])}: {error!r}") from error
        finally:
            for push in self._pushes:
                push.cancel()
            await asyncio.gather(*self._pushes, return_exceptions=True)
            for sender in self._senders:
                await sender.close()
            await self._receiver.close()
            if self._link is not None:
                await asyncio.to_thread(self._link.close)
            self._source.close()
            self._target.close()

    async def _one_round(self) -> None:
        """An operation that finds nothing to do says False and is no round."""
        operations: list[tuple[Callable[[], Any], int]] = [
            (self._issue, 8),
            (self._push_some, 10),
            (self._push_in_parallel, 6),
            (self._push_beside, 8),
            (self._push_and_cancel, 10),
            (self._push_late, 4),
            (self._push_unknown, 1),
            (self._complete, 6),
            (self._take_back, 4),
            (self._release, 4),
            (self._cut, 2),
            (self._change_weather, 4),
            (self._restart_sender, 1),
            (self._restart_receiver, 1),
        ]
        is_idle = True
        while is_idle:
            operation = self._random.choices([op for op, _ in operations], [weight for _, weight in operations])[0]
            is_idle = await asyncio.wait_for(operation(), HANG_S) is False
        self._story.append(operation.__name__)
        for push in [push for push in self._pushes if push.done()]:
            self._pushes.discard(push)
            push.result()
        self.check()

    def check(self) -> None:
        """What must hold at every moment. Raises AssertionError, InvalidTransition or LedgerCorrupt."""
        self._sending.validate()
        self._receiving.validate()
        permits = self._receiver.reception.permits
        permits.validate()
        assert permits.num_permits == len(self._open)
        for opened in self._open:
            for index in opened.arrivals.verified:
                block = self._target.block(opened.ticket.block_ids[index])
                assert block == opened.contents[index], f"block {index} of {opened.ticket.ref} is wrong"
        for block_id, content in self._still.items():
            assert self._target.block(block_id) == content, f"somebody wrote into slot {block_id}, which is nobody's"

    async def _issue(self) -> bool:
        reservation = self._receiving.try_reserve(self._random.randint(1, MAX_TICKET_BLOCKS))
        if reservation is None:
            return False
        ref = TicketRef(f"t{reservation.epoch}", self._receiving.incarnation, reservation.epoch, 1)
        contents = [self._random.randbytes(LAYOUT.block_bytes) for _ in reservation.block_ids]
        ticket = Ticket(ref, "r", 0, reservation.block_ids, 3.0, "", 1, self._addresses(), self._with_digests)
        opened = OpenTicket(ticket, contents)
        self._receiver.open_ticket(ticket, opened.arrivals)
        for block_id in reservation.block_ids:
            self._still.pop(block_id, None)
        self._open.append(opened)
        return True

    def _addresses(self) -> list[TransportAddress]:
        return self._receiver.addresses if self._link is None else [self._link.address]

    async def _push(
        self, opened: OpenTicket, indices: list[int], deadline_s: float = 3.0, cancel_s: float | None = None
    ) -> bool:
        """One push; our blocks are another's the moment it has returned, however it has. False without any."""
        name = f"push-{next(self._names)}"
        block_ids = self._sending.try_hold(name, len(indices)) if indices else None
        if block_ids is None:
            return False
        for index, block_id in zip(indices, block_ids, strict=True):
            self._source.block(block_id)[:] = opened.contents[index]
        digests = [opened.digests[index] for index in indices] if opened.ticket.with_digests else []
        if digests and self._random.random() < 0.05:
            digests[0] ^= 1 << self._random.randrange(64)
        sender = self._random.choice(self._senders)
        push = asyncio.ensure_future(sender.push(opened.ticket, indices, block_ids, digests, deadline_s))
        try:
            if cancel_s is not None:
                await asyncio.wait([push], timeout=cancel_s)
                push.cancel()
            await asyncio.wait([push])
            if push.cancelled():
                self.counts["push cancelled"] += 1
            elif (error := push.exception()) is None:
                self.counts["push done"] += 1
            else:
                assert isinstance(error, TransferError | DeadlineExceeded), repr(error)
                self.counts["push failed"] += 1
        finally:
            push.cancel()
            await asyncio.gather(push, return_exceptions=True)
            for block_id in block_ids:
                self._source.block(block_id)[:] = self._random.randbytes(LAYOUT.block_bytes)
            self._sending.release(name)
        return True

    def _some(self, opened: OpenTicket) -> list[int]:
        """Blocks of it in any order, mostly such as are missing."""
        places = opened.missing if self._random.random() < 0.8 else list(range(opened.ticket.num_blocks))
        return self._random.sample(places, self._random.randint(1, len(places))) if places else []

    def _any(self) -> OpenTicket | None:
        return self._random.choice(self._open) if self._open else None

    async def _push_some(self) -> bool:
        opened = self._any()
        deadline_s = self._random.choice([0.001, 0.02, 3.0, 3.0, 3.0])
        return opened is not None and await self._push(opened, self._some(opened), deadline_s)

    async def _push_in_parallel(self) -> bool:
        """Also twice the same blocks at the same time."""
        chosen = [opened for opened in (self._any() for _ in range(4)) if opened]
        return any(await asyncio.gather(*(self._push(opened, self._some(opened)) for opened in chosen)))

    async def _push_beside(self) -> bool:
        """It goes on while other things happen."""
        opened = self._any()
        if opened is None or len(self._pushes) >= 4:
            return False
        self._pushes.add(asyncio.ensure_future(self._push(opened, self._some(opened))))
        await asyncio.sleep(self._random.random() * CANCEL_S)
        return True

    async def _push_and_cancel(self) -> bool:
        opened = self._any()
        cancel_s = self._random.random() * CANCEL_S
        return opened is not None and await self._push(opened, self._some(opened), cancel_s=cancel_s)

    async def _push_late(self) -> bool:
        """Under a ticket that is over."""
        if not self._past:
            return False
        late = self._random.choice(self._past)
        return await self._push(late, list(range(late.ticket.num_blocks)))

    async def _push_unknown(self) -> bool:
        """Under a ticket that nobody has issued."""
        if (opened := self._any()) is None:
            return False
        ref = msgspec.structs.replace(opened.ticket.ref, epoch=opened.ticket.ref.epoch + 1000)
        stranger = OpenTicket(msgspec.structs.replace(opened.ticket, ref=ref), opened.contents)
        return await self._push(stranger, self._some(stranger), 1.0)

    async def _complete(self) -> bool:
        """When the weather is fair nothing keeps a ticket from being filled and committed."""
        if (opened := self._any()) is None:
            return False
        rate = self.faults.rate
        self._set_rate(0.0)
        while opened.missing:
            await self._push(opened, opened.missing, 1.0)
            await asyncio.sleep(0.002)
        self._set_rate(rate)
        self._open.remove(opened)
        await self._receiver.close_ticket(opened.ticket.ref)
        holder = f"holder-{opened.ticket.ref.epoch}"
        self._holders[holder] = self._receiving.commit(opened.ticket.ref.epoch, holder)
        self._over(opened)
        assert [self._still[block_id] for block_id in opened.ticket.block_ids] == opened.contents
        self.counts["committed"] += 1
        return True

    async def _take_back(self) -> bool:
        """The slots are free for the next ticket as soon as the receiver vouches for it."""
        if (opened := self._any()) is None:
            return False
        self._open.remove(opened)
        self._receiving.abort(opened.ticket.ref.epoch)
        await self._receiver.close_ticket(opened.ticket.ref)
        self._receiving.end_quarantine(opened.ticket.ref.epoch)
        self._over(opened)
        self.counts["taken back"] += 1
        if self._random.random() < 0.5:
            await self._issue()
        return True

    def _over(self, opened: OpenTicket) -> None:
        """From here on nobody may write there."""
        self._past = [*self._past[-5:], opened]
        for block_id in opened.ticket.block_ids:
            self._still[block_id] = bytes(self._target.block(block_id))

    async def _release(self) -> bool:
        if not self._holders:
            return False
        holder = self._random.choice(list(self._holders))
        del self._holders[holder]
        self._receiving.release(holder)
        return True

    async def _cut(self) -> None:
        if self._link is not None:
            self._link.cut()
        else:
            for connection in getattr(self._receiver, "connections", []):
                connection.cut("the test breaks it")

    async def _change_weather(self) -> None:
        self._set_rate(self._random.choice([ROUGH / 2, ROUGH, 2 * ROUGH, 3 * ROUGH]))

    def _set_rate(self, rate: float) -> None:
        self.faults.rate = rate
        self._ends.set_faults(rate)

    async def _restart_sender(self) -> None:
        """Whatever it was just sending."""
        place = self._random.randrange(len(self._senders))
        await self._senders[place].close()
        self._senders[place] = self._ends.make_sender(self._source)
        self.counts["sender restarted"] += 1

    async def _restart_receiver(self) -> None:
        """Another boot, at the same address for those who go through the link."""
        await self._receiver.close()
        for opened in self._open:
            self._over(opened)
        self._open.clear()
        self._holders.clear()
        await self._start_receiver()
        self.counts["receiver restarted"] += 1

    async def _start_receiver(self) -> None:
        boot = f"boot-{next(self._boots)}"
        self._receiving = BlockLedger(NUM_BLOCKS, boot)
        self._receiver = self._ends.make_receiver(self._target, boot)
        await self._receiver.start()
        if self._is_direct:
            return
        if self._link is None:
            self._link = FaultyLink(self._receiver.addresses[0], self.faults)
        self._link.target = self._receiver.addresses[0]

    async def _end(self) -> None:
        """Everything is taken back; every block must be free."""
        while self._open:
            await self._take_back()
        while self._holders:
            await self._release()
        await asyncio.wait_for(asyncio.gather(*self._pushes), HANG_S)
        self._pushes.clear()
        while self._open:
            await self._take_back()
        self.check()
        assert self._sending.counts().is_idle
        assert self._receiving.counts().is_idle
