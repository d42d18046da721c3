"""Where a text ends because a stop string stands in it, found while the text comes in pieces. Pure.

    text so far:  ... given out ... | held: may yet become a stop | to come
    the rule:     the text ends before the leftmost place at which any stop string stands

However the text is cut into pieces, what is given out is the same: a stop that is complete waits while another one that
began further left may still become complete, and is decided by the next characters, or by the end of the text.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """stops: at least one, none of them empty (else ValueError).

    The joined results of `push` and `finish` are the text up to the first stop. A character costs the same however long
    text and stops are; held are never more characters than the longest stop has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not stops or "" in stops:
            raise ValueError(f"stop strings must not be empty: {stops!r}")
        self._open = [_Search(stop) for stop in dict.fromkeys(stops)]
        """Searches that may still find a stop further left than the one that was found."""
        self._held = ""
        self._num_given = 0
        self._num_read = 0
        self._found: int | None = None
        self.is_hit = False
        """The text has ended before a stop string; nothing more comes."""

    def push(self, text: str) -> str:
        """The text that is final now; may be empty. Nothing is read any more after a hit."""
        if self.is_hit:
            return ""
        self._held += text
        for character in text:
            self._num_read += 1
            self._read(character)
            if self._found is not None and not self._open:
                return self._hit(self._found)
        return self._give(self._undecided())

    def finish(self) -> str:
        """The rest, at the end of the text: what was held is no stop, unless one was found."""
        if self.is_hit:
            return ""
        return self._give(self._num_read) if self._found is None else self._hit(self._found)

    def _read(self, character: str) -> None:
        for search in self._open:
            search.read(character)
            if search.is_complete:
                # Of several that end here the longest began first; one that was found before begins further right
                # than any search that is still open.
                start = self._num_read - len(search.stop)
                self._found = start if self._found is None else min(self._found, start)
        found = self._found
        if found is not None:
            self._open = [search for search in self._open if self._num_read - search.num_matched < found]

    def _undecided(self) -> int:
        """Where the text begins that may yet become a stop, or is one."""
        num_matched = max(search.num_matched for search in self._open)
        return self._num_read - num_matched

    def _hit(self, start: int) -> str:
        self.is_hit = True
        given = self._give(start)
        self._held = ""
        return given

    def _give(self, end: int) -> str:
        num_final = end - self._num_given
        final, self._held = self._held[:num_final], self._held[num_final:]
        self._num_given = end
        return final


class _Search:
    """One stop in a text that comes character by character (Knuth, Morris and Pratt).

    num_matched: the last so many characters of the text are the first of the stop, and no more than that are
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = _borders(stop)

    @property
    def is_complete(self) -> bool:
        return self.num_matched == len(self.stop)

    def read(self, character: str) -> None:
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched]
        self.num_matched = matched + 1 if self.stop[matched] == character else 0


def _borders(stop: str) -> list[int]:
    """Entry k: how long the longest beginning is that the first k characters also end with, shorter than k."""
    borders = [0, 0]
    for end in range(1, len(stop)):
        matched = borders[end]
        while matched and stop[matched] != stop[end]:
            matched = borders[matched]
        borders.append(matched + 1 if stop[matched] == stop[end] else 0)
    return borders
