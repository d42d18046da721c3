"""Picks a ticket's path: the best that works. What was found is remembered for each receiver, with its reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from kv_transport.interface import BlockSender, PushReceipt
from kv_transport.path_book import PathBook, PathRecord
from pd_core.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pd_core.ticket import Ticket, TransportAddress

_log = logging.getLogger(__name__)


def usable_paths(addresses: Sequence[TransportAddress], ours: Sequence[str]) -> list[str]:
    """Paths of the addresses that are among `ours`, in the order of the addresses, each once.

    Raises TransferError naming both sides' paths when there is none.
    """
    paths = list(dict.fromkeys(address.path for address in addresses if address.path in ours))
    if paths:
        return paths
    offered = ", ".join(f"{address.path} {address.host}:{address.port}" for address in addresses) or "nothing"
    raise TransferError(f"no way to write to the ticket's pool: it offers {offered}; we have {', '.join(ours) or '-'}")


class RoutedSender:
    """BlockSender over several. Belongs to one event loop.

    A push takes the best path of its ticket. When that fails, it goes on over the next one at once, with all its
    blocks: the receiver drops what it has already. The path that failed is tried again only by later pushes, after a
    time that doubles with each failure in a row.
    """

    def __init__(self, senders: Mapping[str, BlockSender]) -> None:
        self._senders = dict(senders)
        self._book = PathBook()

    async def push(
        self,
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> PushReceipt:
        """See BlockSender.push. A sender sees the addresses of its own path alone.

        Raises LayoutMismatch at once; else, when every path fails, what the last one raised or, for several, a
        TransferError that names them all.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + deadline_s
        incarnation = ticket.ref.incarnation
        failures: dict[str, TransferError | DeadlineExceeded] = {}
        paths = usable_paths(ticket.addresses, list(self._senders))
        for path in self._book.order(incarnation, paths, loop.time()):
            left_s = ends_s - loop.time()
            if failures and left_s <= 0:
                break
            addresses = [address for address in ticket.addresses if address.path == path]
            narrowed = msgspec.structs.replace(ticket, addresses=addresses)
            try:
                receipt = await self._senders[path].push(narrowed, indices, block_ids, digests, left_s)
            except LayoutMismatch:
                raise
            except (TransferError, DeadlineExceeded) as error:
                failures[path] = error
                record = self._book.failed(incarnation, path, error.message, loop.time())
                _log.warning(
                    "KV path %s to boot %s failed, %d in a row: %s", path, incarnation, record.num_failures, error
                )
            else:
                if self._book.worked(incarnation, path):
                    _log.info("KV path to boot %s: %s works", incarnation, path)
                return receipt
        raise _joined(failures)

    def paths(self) -> dict[str, dict[str, PathRecord]]:
        """What was found, by the receiver's incarnation and path."""
        return self._book.report()

    def path_to(self, incarnation: str) -> str:
        return self._book.describe(incarnation)

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
    return TransferError("; ".join(f"{path}: {error.message}" for path, error in failures.items()))
