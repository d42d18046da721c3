"""Picks a ticket's path: the best that works. What was found is remembered for each receiver, with its reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from kv_transport.interface import BlockSender, PushReceipt
from kv_transport.path_book import PathBook, PathRecord
from kv_transport.path_tally import PathTally
from pd_core.errors import DeadlineExceeded, LayoutMismatch, TransferError, Unreachable
from pd_core.ticket import Ticket, TransportAddress
from pd_core.transfer import PathTotals
from pd_rpc.address import format_address

_log = logging.getLogger(__name__)

LAST_PATH = "tcp"
"""Which is there always and worse than every other: who uses it wants to know why."""


def usable_paths(addresses: Sequence[TransportAddress], ours: Sequence[str]) -> list[str]:
    """Paths of the addresses that are among `ours`, in the order of the addresses, each once.

    Raises TransferError naming both sides' paths when there is none.
    """
    paths = list(dict.fromkeys(address.path for address in addresses if address.path in ours))
    if paths:
        return paths
    offered = (
        ", ".join(f"{address.path} {format_address(address.host, address.port)}" for address in addresses) or "nothing"
    )
    raise TransferError(f"no way to write to the ticket's pool: it offers {offered}; we have {', '.join(ours) or '-'}")


class RoutedSender:
    """BlockSender over several. Belongs to one event loop.

    A push takes the best path of its ticket. When that fails, it goes on over the next one at once, with all its
    blocks: the receiver drops what it has already. The path that failed is tried again only by later pushes, after a
    time that doubles with each failure in a row. That a worse path is taken is logged once, and counted every time.
    A ticket that names one path alone has its pushes go over that one, whatever is known of it.

    senders:  by path, best first
    left_out: why we do not use a path that is better than tcp, by its name; for people
    """

    def __init__(self, senders: Mapping[str, BlockSender], left_out: Mapping[str, str] | None = None) -> None:
        self._senders = dict(senders)
        self._left_out = dict(left_out or {})
        self._book = PathBook()
        self._tally = PathTally()

    async def push(
        self,
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> PushReceipt:
        """See BlockSender.push. A sender sees the addresses of its own path alone. Each path has the deadline anew:
        the time before may have been a wait for a turn. Where one has used it up no other is tried.

        Raises LayoutMismatch at once; else, when every path fails, what the last one raised or, for several, a
        TransferError that names them all.
        """
        loop = asyncio.get_running_loop()
        incarnation = ticket.ref.incarnation
        failures: dict[str, TransferError | DeadlineExceeded] = {}
        paths = usable_paths(ticket.addresses, list(self._senders))
        for path in self._book.order(incarnation, paths, loop.time()):
            addresses = [address for address in ticket.addresses if address.path == path]
            narrowed = msgspec.structs.replace(ticket, addresses=addresses)
            try:
                receipt = await self._senders[path].push(narrowed, indices, block_ids, digests, deadline_s)
            except LayoutMismatch as error:
                self._tally.failed(path, error.code)
                raise
            except (TransferError, DeadlineExceeded) as error:
                failures[path] = error
                self._tally.failed(path, error.code)
                record = self._book.failed(incarnation, path, error.message, loop.time())
                level = logging.WARNING if record.num_failures == 1 else logging.INFO
                said = "KV path %s to boot %s failed, %d in a row: %s"
                _log.log(level, said, path, incarnation, record.num_failures, error)
                if isinstance(error, DeadlineExceeded):
                    break
            else:
                self._tally.got_through(path, paths[0], receipt.num_bytes, receipt.seconds)
                if self._book.worked(incarnation, path):
                    _log.info("KV path to boot %s: %s works", incarnation, path)
                return receipt
        raise _joined(failures)

    def paths(self) -> dict[str, dict[str, PathRecord]]:
        """What was found, by the receiver's incarnation and path."""
        return self._book.report()

    def totals(self) -> dict[str, PathTotals]:
        """What pushes came to, by path."""
        return self._tally.totals()

    def path_to(self, incarnation: str) -> str:
        said = self._book.describe(incarnation, list(self._senders))
        if not said.startswith(LAST_PATH) or not self._left_out:
            return said
        return f"{said}; " + "; ".join(f"{path} is not used: {reason}" for path, reason in self._left_out.items())

    async def close(self) -> None:
        """Closes every sender, also when one of them fails to."""
        errors: list[Exception] = []
        for sender in self._senders.values():
            try:
                await sender.close()
            except Exception as error:  # the others are to be closed all the same; raised below
                errors.append(error)
        if errors:
            raise ExceptionGroup("senders could not be closed", errors)


def _joined(failures: Mapping[str, TransferError | DeadlineExceeded]) -> TransferError | DeadlineExceeded:
    if len(failures) == 1:
        return next(iter(failures.values()))
    kind = Unreachable if all(isinstance(error, Unreachable) for error in failures.values()) else TransferError
    return kind("; ".join(f"{path}: {error.message}" for path, error in failures.items()))
