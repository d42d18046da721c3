"""Makes huge pages of a pool's small ones, behind its users.

Most kernels give shared memory small pages only (`shmem_enabled` is "never"), with which a decode step that reads much
KV takes up to 7 % longer. But they put small pages together when asked (MADV_COLLAPSE, Linux 6.1), whatever that
setting says. So a thread looks twice a second for pieces of the pool that came into use, and asks: about 3 ms for
2 MiB, once in the pool's life. Nothing is taken from the machine before it is used.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections import Counter

import numpy as np

from kv_transport.shm_pool import HUGE_PAGE_BYTES

_log = logging.getLogger(__name__)

LOOK_S = 0.5
MAX_TRIES = 4
"""How often one piece is tried: a machine may have no huge page left at this moment, or ever."""
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HugePages:
    """Of the pool in the file `fd`, mapped at `pages`. `fd` stays open until `close`."""

    def __init__(self, fd: int, pages: memoryview) -> None:
        self._fd = fd
        self._address = int(np.frombuffer(pages, np.uint8).ctypes.data)
        self._num_pieces = len(pages) // HUGE_PAGE_BYTES
        self._pages: memoryview | None = pages  # keeps them mapped while we name their address
        self._is_done = bytearray(self._num_pieces)  # 1: huge, or given up
        self._failures: Counter[int] = Counter()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-pages", daemon=True)
        if self._num_pieces:
            self._thread.start()

    @property
    def num_done(self) -> int:
        """Pieces that need no more looking at."""
        return self._is_done.count(1)

    def close(self) -> None:
        """Returns when the thread has ended: after one piece, if it is at one."""
        self._is_closed.set()
        if self._num_pieces:
            self._thread.join()
        self._pages = None

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            if self.num_done == self._num_pieces or not self._look():
                return

    def _look(self) -> bool:
        """Tries every piece in use that is not done; False when this kernel cannot do it at all."""
        piece = self._next_to_do(0)
        while piece is not None and not self._is_closed.is_set():
            code = self._collapse(piece)
            if code == errno.EINVAL:
                _log.info("the pool stays in small pages: this kernel makes no huge ones of shared memory")
                return False
            self._failures[piece] += code != 0
            self._is_done[piece] = code == 0 or self._failures[piece] == MAX_TRIES
            piece = self._next_to_do(piece + 1)
        return True

    def _next_to_do(self, piece: int) -> int | None:
        """The first whole piece from `piece` on that is not done and in which a byte was ever touched."""
        while (piece := self._is_done.find(0, piece)) >= 0:
            try:
                in_use = os.lseek(self._fd, piece * HUGE_PAGE_BYTES, os.SEEK_DATA) // HUGE_PAGE_BYTES
            except OSError as error:
                if error.errno != errno.ENXIO:  # nothing but a hole up to the end
                    raise
                return None
            if in_use == piece:
                return piece
            piece = in_use
        return None

    def _collapse(self, piece: int) -> int:
        """The error's number, 0 for none."""
        failed = _libc.madvise(self._address + piece * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
        return ctypes.get_errno() if failed else 0
