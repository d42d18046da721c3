"""What is kept of the cached blocks when room is short. Pure: time comes in, and there is no chance in it.

Two policies over one forest. Both let only leaves go, so a child never stays without its parent, and none that is
pinned. A use of a block is a use of all its ancestors.

    LruPolicy         the leaf that was used longest ago goes
    HitDensityPolicy  the leaf goes whose room brings least: how often a block like it is used per second (learnt, see
                      return_times), times what it costs to compute it again (more the later it stands in its prefix)

Each call costs O(log n) on the average for each block that it names, and a use at most one step for each ancestor that
was not used just before. Memory is bounded by the number of blocks. `now_s` may come from any clock that does not go
back. Both do what nvme_eviction asks of them.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from kv_store.forest import Forest, Node
from kv_store.return_times import NUM_KINDS, NUM_SPANS, ReturnTimes, kind_of, span_end_s, span_of
from kv_store.ticket_heap import TicketHeap
from pd_core.errors import InvalidTransition, LedgerCorrupt
from pd_core.layout import BLOCK_TOKENS

SAME_USE_S = 1.0
"""Uses that follow each other sooner are one use: whoever reads a prefix may touch every block of it."""
GHOSTS_PER_BLOCK = 4
MOST_GHOSTS = 2**20
FEWEST_GHOSTS = 1024
"""Blocks that are remembered after they went, so that their return is seen."""
EQUAL_COST_TOKENS = 32768
"""Position from which attention costs as much as all else of a token: about that of models of 7 billion weights."""
STALE_FACTOR = 4
STALE_ALLOWANCE = 1024
"""Entries that do not count are cleared away when they are so many times as many as leaves, and so many more."""


def typical_cost(position: int) -> float:
    """What a block at `position` costs to compute, beside the first of a prefix. See EQUAL_COST_TOKENS."""
    return 1.0 + position * BLOCK_TOKENS / EQUAL_COST_TOKENS


class ForestPolicy(ABC):
    """Knows every cached block of one tier or pool, and says which are to go.

    What is unknown, or is there when it should not be, raises InvalidTransition and changes nothing.
    """

    def __init__(self) -> None:
        self._forest = Forest()
        self._loose: dict[Node, None] = {}
        """May go, but are in no heap yet: whoever adds a prefix block by block has each for a moment as a leaf."""
        self._num_tickets = 0
        self._num_ranked = 0

    def __len__(self) -> int:
        return len(self._forest)

    def __contains__(self, name: bytes) -> bool:
        return name in self._forest

    def add(self, name: bytes, parent: bytes, position: int, now_s: float) -> None:
        """A block is cached from now on. For position 0 `parent` is the tenant's root, else a cached block."""
        node = self._forest.add(name, parent, position)
        if node.parent is not None:
            self._withdraw(node.parent)
        self._loose[node] = None
        self._added(node, now_s)

    def touch(self, name: bytes, now_s: float) -> None:
        """The block was used, and with it all its ancestors. To say it of the last of a prefix is enough."""
        node = self._forest.find(name)
        self._used(node, now_s)
        self._withdraw(node)
        self._offer(node)

    def pin(self, name: bytes) -> None:
        """The block and its ancestors stay until it is unpinned as often as it was pinned."""
        node = self._forest.find(name)
        node.num_pins += 1
        self._withdraw(node)

    def unpin(self, name: bytes) -> None:
        node = self._forest.find(name)
        if not node.num_pins:
            raise InvalidTransition(f"block {name.hex()} is not pinned")
        node.num_pins -= 1
        self._offer(node)

    def victims(self, num_blocks: int) -> list[bytes]:
        """Up to `num_blocks` blocks that are to go, in this order: children before parents. Fewer when all others are
        pinned or have pinned descendants. Nothing is changed; `remove` follows for each that does go."""
        chosen: list[Node] = []
        self._rank_loose()
        self._clear_stale()
        while len(chosen) < num_blocks and (node := self._worst()) is not None:
            self._withdraw(node)
            chosen.append(node)
            if node.parent is not None:
                self._inherit(node.parent, node)
                node.parent.num_children -= 1  # as if it had gone
                self._offer(node.parent)
                self._rank_loose()
        for node in reversed(chosen):
            if node.parent is not None:
                node.parent.num_children += 1
                self._withdraw(node.parent)
            self._offer(node)
        return [node.name for node in chosen]

    def remove(self, name: bytes) -> None:
        """The block is gone, pinned or not. It must have no children."""
        self._remove(self._forest.find(name))

    def remove_family(self, name: bytes) -> list[bytes]:
        """The block is gone and all that continue it, pinned or not: children before parents, as they are returned."""
        family = self._forest.family(self._forest.find(name))
        for node in family:
            self._remove(node)
        return [node.name for node in family]

    def forget(self, name: bytes) -> None:
        """Nothing is remembered of a block that has gone. Does nothing for one that is unknown."""
        if name in self._forest:
            raise InvalidTransition(f"block {name.hex()} is cached")
        self._forgot(name)

    def validate(self) -> None:
        """Raises LedgerCorrupt unless the forest is whole and exactly the unpinned leaves may go."""
        self._forest.validate()
        for node in self._forest:
            if node.may_go != (node in self._loose or node.ticket != 0) or (node in self._loose and node.ticket):
                raise LedgerCorrupt(
                    f"block {node.name.hex()} may {'' if node.may_go else 'not '}go, but is not ranked so"
                )
        if sum(node.ticket != 0 for node in self._forest) != self._num_ranked:
            raise LedgerCorrupt("ranked leaves are miscounted")

    @abstractmethod
    def _added(self, node: Node, now_s: float) -> None:
        """A new leaf."""

    @abstractmethod
    def _used(self, node: Node, now_s: float) -> None:
        """A use of the node and of its ancestors."""

    @abstractmethod
    def _rank(self, node: Node) -> None:
        """Puts a node that has just got a ticket into a heap."""

    @abstractmethod
    def _worst(self) -> Node | None:
        """The ranked node that is to go first."""

    @abstractmethod
    def _heaps(self) -> list[TicketHeap]:
        """All that hold entries."""

    def _inherit(self, parent: Node, child: Node) -> None:  # noqa: B027 - most have nothing to do
        """`child` goes before `parent`: what is known of the child alone."""

    def _gone(self, node: Node) -> None:  # noqa: B027
        """The node was removed."""

    def _forgot(self, name: bytes) -> None:  # noqa: B027
        """Nothing may be remembered of it."""

    def _remove(self, node: Node) -> None:
        self._forest.remove(node)
        self._withdraw(node)
        if node.parent is not None:
            self._inherit(node.parent, node)
            self._offer(node.parent)
        self._gone(node)

    def _offer(self, node: Node) -> None:
        if node.may_go and not node.ticket:
            self._loose[node] = None

    def _withdraw(self, node: Node) -> None:
        self._loose.pop(node, None)
        if node.ticket:
            node.ticket = 0
            self._num_ranked -= 1

    def _rank_loose(self) -> None:
        for node in self._loose:
            self._num_tickets += 1
            self._num_ranked += 1
            node.ticket = self._num_tickets
            self._rank(node)
        self._loose.clear()

    def _clear_stale(self) -> None:
        heaps = self._heaps()
        if sum(map(len, heaps)) > STALE_FACTOR * self._num_ranked + STALE_ALLOWANCE:
            for heap in heaps:
                heap.compact()


class LruPolicy(ForestPolicy):
    """The leaf whose last use is longest ago goes. Order of the calls alone counts, not their times."""

    def __init__(self) -> None:
        super().__init__()
        self._num_uses = 0
        self._heap = TicketHeap()

    def _added(self, node: Node, now_s: float) -> None:
        self._used(node, now_s)

    def _used(self, node: Node, now_s: float) -> None:
        self._num_uses += 1
        node.used = self._num_uses

    def _inherit(self, parent: Node, child: Node) -> None:
        # Ancestors are used with it. They could not go before it, so they need not have known until now.
        parent.used = max(parent.used, child.used)

    def _rank(self, node: Node) -> None:
        self._heap.push(node.used, 0.0, node)

    def _worst(self) -> Node | None:
        entry = self._heap.first()
        return entry.node if entry is not None else None

    def _heaps(self) -> list[TicketHeap]:
        return [self._heap]


class _Cell(TicketHeap):
    """Leaves of one kind in one span of ages. `worth` is that of each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = 0.0
        self.is_in_use = False


def _worth_of(cell: _Cell) -> float:
    return cell.worth


class HitDensityPolicy(ForestPolicy):
    """The leaf goes that brings least for its room: worth of its kind and age, times its cost.

    block_cost: what the block at a position costs to compute again, never less than 1 (that of the first) and never
                less than at an earlier position; the unit is of no matter
    """

    # One cell for each kind and span of ages: in it all are worth the same, so they are ranked by cost, then by age.
    #
    #             span 0    1    2  ...        A leaf that gets older goes from cell to cell; `_ageing` knows when.
    #   kind 0    cell    cell   cell          The first of each cell are compared, the least worth first, until a cell
    #   kind 1    cell    cell   cell          is worth more than what the worst so far brings.

    def __init__(self, block_cost: Callable[[int], float] = typical_cost) -> None:
        super().__init__()
        self._cost = block_cost
        self._times = ReturnTimes()
        self._cells = [[_Cell() for _ in range(NUM_SPANS)] for _ in range(NUM_KINDS)]
        self._in_use: list[_Cell] = []
        """Those with entries, the least worth first."""
        self._ageing = TicketHeap()
        self._ghosts: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """(when it was used last, how often) of blocks that went, the one that went longest ago first."""
        self._now_s = -math.inf

    def victims(self, num_blocks: int) -> list[bytes]:
        """As of the last time that was told."""
        if self._times.learn(self._now_s):
            for kind, cells in enumerate(self._cells):
                for span, cell in enumerate(cells):
                    cell.worth = self._times.worth(kind, span)
            self._in_use.sort(key=_worth_of)
        while (node := self._ageing.pop_up_to(self._now_s)) is not None:
            self._withdraw(node)
            self._offer(node)
        return super().victims(num_blocks)

    def _added(self, node: Node, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        used_s, num_uses = self._ghosts.pop(node.name, (now_s, 0))
        if num_uses:
            self._times.returned(num_uses, now_s - used_s)
        self._count(node, num_uses + 1, now_s)

    def _used(self, node: Node, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        at: Node | None = node
        while at is not None and now_s - at.used >= SAME_USE_S:
            self._times.returned(at.num_uses, now_s - at.used)
            self._count(at, at.num_uses + 1, now_s)
            at = at.parent

    def _count(self, node: Node, num_uses: int, now_s: float) -> None:
        node.num_uses, node.used = num_uses, now_s
        self._times.used(num_uses)

    def _rank(self, node: Node) -> None:
        span = span_of(self._now_s - node.used)
        cell = self._cells[kind_of(node.num_uses)][span]
        cell.push(self._cost(node.position), node.used, node)
        if not cell.is_in_use:
            cell.is_in_use = True
            bisect.insort(self._in_use, cell, key=_worth_of)
        end_s = span_end_s(span)
        if end_s is not None:
            self._ageing.push(node.used + end_s, 0.0, node)

    def _worst(self) -> Node | None:
        worst: Node | None = None
        least = (math.inf, math.inf, 0)
        empty: list[_Cell] = []
        for cell in self._in_use:
            if cell.worth > least[0]:
                break  # no cost is less than 1
            entry = cell.first()
            if entry is None:
                empty.append(cell)
                continue
            brings = (cell.worth * entry.rank, entry.then, entry.serial)
            if brings < least:
                worst, least = entry.node, brings
        for cell in empty:
            cell.is_in_use = False
            self._in_use.remove(cell)
        return worst

    def _heaps(self) -> list[TicketHeap]:
        return [self._ageing, *self._in_use]

    def _gone(self, node: Node) -> None:
        self._ghosts[node.name] = (node.used, node.num_uses)
        most = min(MOST_GHOSTS, max(FEWEST_GHOSTS, GHOSTS_PER_BLOCK * len(self)))
        while len(self._ghosts) > most:
            self._ghosts.popitem(last=False)

    def _forgot(self, name: bytes) -> None:
        self._ghosts.pop(name, None)
