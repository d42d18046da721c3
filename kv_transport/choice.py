"""Picks a ticket's path. The first address that this process can write to: tickets list them best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kv_transport.interface import BlockSender, PushReceipt
from pd_core.errors import TransferError
from pd_core.ticket import Ticket, TransportAddress


def choose_path(addresses: Sequence[TransportAddress], ours: Sequence[str]) -> str:
    """The path of the first address whose path is among `ours`. Raises TransferError naming both sides' paths."""
    for address in addresses:
        if address.path in ours:
            return address.path
    offered = ", ".join(f"{address.path} {address.host}:{address.port}" for address in addresses) or "nothing"
    raise TransferError(f"no way to write to the ticket's pool: it offers {offered}; we have {', '.join(ours) or '-'}")


class RoutedSender:
    """BlockSender over several: each push goes to the sender of the path that `choose_path` picks."""

    def __init__(self, senders: Mapping[str, BlockSender]) -> None:
        self._senders = dict(senders)

    async def push(
        self,
        ticket: Ticket,
        indices: Sequence[int],
        block_ids: Sequence[int],
        digests: Sequence[int],
        deadline_s: float,
    ) -> PushReceipt:
        """See BlockSender.push. The chosen sender sees the addresses of its own path alone."""
        path = choose_path(ticket.addresses, list(self._senders))
        addresses = [address for address in ticket.addresses if address.path == path]
        narrowed = msgspec.structs.replace(ticket, addresses=addresses)
        return await self._senders[path].push(narrowed, indices, block_ids, digests, deadline_s)

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
