"""A heap whose entries end when their node gets another ticket. Pure.

Taking a node out of the middle of a heap costs as much as searching for it, so it stays where it is: an entry counts
only while its ticket is its node's. What does not count is dropped when it comes to the top, or by `compact`, which
whoever owns the heap calls before too much of it has gathered.
"""

from __future__ import annotations

import heapq

from kv_store.forest import Node


class TicketHeap:
    """Nodes by rank, lowest first; O(log n) a call, save `compact`."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, float, int, Node]] = []

    def __len__(self) -> int:
        """Entries, those that do not count too."""
        return len(self._entries)

    def push(self, rank: float, then: float, node: Node) -> None:
        """`then` decides between equal ranks, and after it the node's ticket."""
        heapq.heappush(self._entries, (rank, then, node.ticket, node))

    def first(self) -> Node | None:
        entries = self._entries
        while entries:
            _, _, ticket, node = entries[0]
            if node.ticket == ticket:
                return node
            heapq.heappop(entries)
        return None

    def pop_up_to(self, rank: float) -> Node | None:
        """The first node, if its rank is `rank` at most; its entry is taken out."""
        node = self.first()
        if node is None or self._entries[0][0] > rank:
            return None
        heapq.heappop(self._entries)
        return node

    def compact(self) -> None:
        self._entries = [entry for entry in self._entries if entry[3].ticket == entry[2]]
        heapq.heapify(self._entries)
