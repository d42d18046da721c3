"""The cached blocks as a forest: every block knows its parent, and only what nobody continues may go.

    root of a tenant      position 0        1         2         3
                          block ------- block ---- block ---- block          a leaf
                                          `------- block                     a leaf
    pinned: stays, and so do its ancestors, because they have a child

Pure. A call that makes no sense raises InvalidTransition and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pd_core.errors import InvalidTransition, LedgerCorrupt


class Node:
    """One cached block. Ticket and uses are the policy's, all else the forest's.

    position:     of the block in its sequence, 0 for the first
    num_children: that count; fewer than `children` while a policy looks ahead
    serial:       of all blocks that ever came, in their order: decides where nothing else does
    ticket:       of its valid entry in a policy's heaps; 0 when it is in none
    used:         when it was used last, in the policy's own measure
    num_uses:     how often it was used, as the policy counts
    """

    __slots__ = (
        "children",
        "name",
        "num_children",
        "num_pins",
        "num_uses",
        "parent",
        "position",
        "serial",
        "ticket",
        "used",
    )

    def __init__(self, name: bytes, parent: Node | None, position: int, serial: int) -> None:
        self.name = name
        self.serial = serial
        self.parent = parent
        self.position = position
        self.children: dict[Node, None] = {}
        self.num_pins = 0
        self.num_children = 0
        self.ticket = 0
        self.used = -math.inf
        self.num_uses = 0

    @property
    def may_go(self) -> bool:
        return not self.num_children and not self.num_pins


class Forest:
    """Blocks by name. Memory: one node a block, nothing that grows with time."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, name: bytes) -> Node:
        node = self._nodes.get(name)
        if node is None:
            raise InvalidTransition(f"block {name.hex()} is not cached")
        return node

    def add(self, name: bytes, parent: bytes, position: int) -> Node:
        """A leaf after `parent`, which is the tenant's root for position 0 and else a cached block one before it."""
        if name in self._nodes:
            raise InvalidTransition(f"block {name.hex()} is cached already")
        before = self._nodes.get(parent) if position else None
        if position < 0 or (position and (before is None or before.position != position - 1)):
            raise InvalidTransition(f"block {name.hex()} at position {position} has no parent {parent.hex()} here")
        self._num_added += 1
        node = Node(name, before, position, self._num_added)
        if before is not None:
            before.children[node] = None
            before.num_children += 1
        self._nodes[name] = node
        return node

    def remove(self, node: Node) -> None:
        if node.children:
            raise InvalidTransition(f"block {node.name.hex()} is continued by {len(node.children)} others")
        del self._nodes[node.name]
        if node.parent is not None:
            del node.parent.children[node]
            node.parent.num_children -= 1

    def family(self, top: Node) -> list[Node]:
        """`top` and all that continue it, children before parents."""
        nodes = [top]
        for node in nodes:
            nodes.extend(node.children)
        return nodes[::-1]

    def validate(self) -> None:
        """Raises LedgerCorrupt when a child has no parent, or is counted wrongly."""
        for name, node in self._nodes.items():
            parent = node.parent
            if node.name != name or (parent is None) != (node.position == 0):
                raise LedgerCorrupt(f"block {name.hex()} is misplaced")
            if parent is not None and (self._nodes.get(parent.name) is not parent or node not in parent.children):
                raise LedgerCorrupt(f"block {name.hex()} has no parent")
            if node.num_children != len(node.children) or any(child.parent is not node for child in node.children):
                raise LedgerCorrupt(f"block {name.hex()} has miscounted children")
            if node.num_pins < 0:
                raise LedgerCorrupt(f"block {name.hex()} has {node.num_pins} pins")
