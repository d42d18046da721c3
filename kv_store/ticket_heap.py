"""A heap whose entries end when their node gets another ticket. Pure.

Taking a node out of the middle of a heap costs as much as searching for it, so it stays where it is: an entry counts
only while its ticket is its node's. What does not count is dropped when it comes to the top, or by `compact`, which
whoever owns the heap calls before too much of it has gathered.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from kv_store.forest import Node


class Entry(NamedTuple):
    """`then` decides between equal ranks, and after it who came first."""

    rank: float
    then: float
    serial: int
    ticket: int
    node: Node


class TicketHeap:
    """Nodes by rank, lowest first; O(log n) a call, save `compact`."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        """Entries, those that do not count too."""
        return len(self._entries)

    def push(self, rank: float, then: float, node: Node) -> None:
        heapq.heappush(self._entries, Entry(rank, then, node.serial, node.ticket, node))

    def first(self) -> Entry | None:
        entries = self._entries
        while entries:
            entry = entries[0]
            if entry.node.ticket == entry.ticket:
                return entry
            heapq.heappop(entries)
        return None

    def pop_up_to(self, rank: float) -> Node | None:
        """The first node, if its rank is `rank` at most; its entry is taken out."""
        entry = self.first()
        if entry is None or entry.rank > rank:
            return None
        heapq.heappop(self._entries)
        return entry.node

    def compact(self) -> None:
        self._entries = [entry for entry in self._entries if entry.node.ticket == entry.ticket]
        heapq.heapify(self._entries)
