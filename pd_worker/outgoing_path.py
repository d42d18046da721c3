"""What all handoffs that a worker makes share: the way to the receivers, and the thread that makes digests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kv_transport.digest import BlockDigests, block_digest
from kv_transport.interface import BlockSender
from pd_core.memory import BlockMemory
from pd_core.ticket import Ticket
from pd_rpc.tasks import BackgroundTasks, finish_regardless
from pd_worker.control import ControlConnections
from pd_worker.counters import Counters
from pd_worker.outgoing_blocks import DirectBlocks, OutgoingBlocks


class OutgoingPath:
    """What all handoffs of one worker share. Belongs to the event loop.

    memory:         what the sender reads
    blocks:         the pool, and how its blocks get into the memory; None: the memory is the pool
    push_timeout_s: the longest that one push may take from its turn on, and that a verdict may take from the last push
                    on while no block arrives. Who waits behind others is not late: each of those has a deadline
    on_failure:     told of faults of ours, after which handoffs are no longer looked after
    """

    def __init__(
        self,
        memory: BlockMemory,
        sender: BlockSender,
        control: ControlConnections,
        counters: Counters,
        push_timeout_s: float,
        on_failure: Callable[[BaseException], None],
        blocks: OutgoingBlocks | None = None,
    ) -> None:
        self.blocks: OutgoingBlocks = DirectBlocks(memory) if blocks is None else blocks
        self.sender = sender
        self.control = control
        self.counters = counters
        self.push_timeout_s = push_timeout_s
        self.tasks = BackgroundTasks(on_failure)
        self.on_failure = on_failure
        self._memory = memory
        self._num_pushes = 0
        self._digesting = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")

    @property
    def block_bytes(self) -> int:
        return self._memory.block_bytes

    def most_at_once(self, ticket: Ticket) -> int | None:
        """Most blocks of one push: what both pools allow."""
        limits = [most for most in (ticket.most_frame_blocks, self.blocks.most_at_once) if most is not None]
        return min(limits, default=None)

    @contextmanager
    def in_line(self) -> Iterator[float]:
        """For one push; gives how long it may wait for room, seconds: those ahead of it may take so long together."""
        self._num_pushes += 1
        try:
            yield self._num_pushes * self.push_timeout_s
        finally:
            self._num_pushes -= 1

    async def digests(self, block_ids: Sequence[int]) -> list[int]:
        """Digests of blocks of the memory, made beside the event loop. When it is cancelled too, nothing reads them."""
        loop = asyncio.get_running_loop()
        return await finish_regardless(loop.run_in_executor(self._digesting, self._digest_all, list(block_ids)))

    def paths(self) -> dict[str, str]:
        """How KV goes to each worker that we are connected to, by its name; see BlockSender.path_to."""
        described = {peer.name: self.sender.path_to(peer.incarnation) for peer in self.control.peers}
        return {name: path for name, path in described.items() if path}

    async def close(self) -> None:
        """Ends what still runs and the connections."""
        await self.tasks.close()
        await self.sender.close()
        await self.control.close()
        self._digesting.shutdown(wait=True)  # idle: every digest was awaited

    def late_digests(self, block_ids: Sequence[int], keys: Sequence[int], known: dict[int, int]) -> Sequence[int]:
        """The same without a detour: whoever sends the blocks makes them, unless they are `known` by their keys."""
        return BlockDigests([self._memory.block(block_id) for block_id in block_ids], keys, known)

    def _digest_all(self, block_ids: Sequence[int]) -> list[int]:
        return [block_digest(self._memory.block(block_id)) for block_id in block_ids]
