"""When a receiver that was told "everything is sent" answers that blocks are missing. Pure.

The writer's last bytes may still be on their way when its word comes over the control connection, so what has not
arrived yet is not missing yet. It is when it is known to have come wrong, or when nothing new has come for a while.
"""

from __future__ import annotations

import msgspec

QUIET_S = 0.3
"""How long nothing may come before we say so, for a range of few bytes."""
QUIET_AFTER_BREAK_S = 0.05
"""The same when a connection broke in the middle of a frame: its bytes are known to be lost."""
SLOWEST_BYTES_PER_S = 20e6
"""A slower path than this is taken for a dead one, unless blocks have come more slowly before."""
LONGEST_QUIET_S = 3.0
GAPS = 4
"""What came in steps so far may come in a step so many times longer before it counts as missing."""


class Arrival(msgspec.Struct, frozen=True):
    """What is known of a range that is not complete.

    num_missing:  blocks that have not arrived
    num_corrupt:  of those, blocks that came wrong since the last answer
    has_broken:   whether a connection broke in the middle of a frame since then
    last_news_s:  when something was heard of the writer or its blocks
    longest_gap_s: between two arrivals of blocks so far: how slow the wire is known to be
    """

    num_missing: int
    num_corrupt: int
    has_broken: bool
    last_news_s: float
    longest_gap_s: float = 0.0


def answer_at_s(arrival: Arrival, block_bytes: int) -> float:
    """The moment to answer, if nothing new comes until then."""
    if arrival.num_corrupt >= arrival.num_missing:
        return arrival.last_news_s
    if arrival.has_broken:
        return arrival.last_news_s + QUIET_AFTER_BREAK_S
    quiet_s = QUIET_S + arrival.num_missing * block_bytes / SLOWEST_BYTES_PER_S
    quiet_s = max(quiet_s, GAPS * arrival.longest_gap_s)
    return arrival.last_news_s + min(quiet_s, LONGEST_QUIET_S)
