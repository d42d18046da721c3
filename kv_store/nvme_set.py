"""The open files of one set: headers and bodies. See slot_format for what lies in them.

Order. A slot that held another block has its header emptied before its body is written, and a header is written after
its body: whatever is killed in between leaves a body without a header, which is a free slot. A power cut may undo any
of it that `sync` has not covered; then a header may name a body that is not there: the digest says so when it is read.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Literal

from kv_store.nvme_files import DiskFiles
from kv_store.slot_format import (
    HEADER_BYTES,
    PAGE_BYTES,
    SetPage,
    header_offset,
    pack_set_page,
    whole_slots,
)

IoMode = Literal["direct", "buffered"]
HEADERS = "headers"
BODIES = "bodies"

_log = logging.getLogger(__name__)


class SlotFiles:
    """An open set. Every method reaches the disk and raises OSError; different slots may be used from many threads."""

    def __init__(self, files: DiskFiles, folder: Path, page: SetPage) -> None:
        """Opens files that are there. Raises FileNotFoundError where one is not."""
        self._files = files
        self._folder = folder
        self._page = page
        self._headers = files.open(folder / HEADERS, os.O_RDWR)
        try:
            self._bodies, self.mode = self._open_bodies()
        except BaseException:
            files.close(self._headers)
            raise

    def close(self) -> None:
        self._files.close(self._bodies)
        self._files.close(self._headers)

    def has_our_page(self) -> bool:
        """Whether the set is ours to use: its page says exactly what we would write."""
        found = bytearray(PAGE_BYTES)
        num_read = self._files.read(self._headers, memoryview(found), 0)
        return num_read == PAGE_BYTES and bytes(found) == pack_set_page(self._page)

    def fit(self, most_slots: int | None = None) -> int:
        """Cuts both files to the slots that are whole, at most `most_slots`; returns how many."""
        sizes = (self._files.size(self._headers), self._files.size(self._bodies))
        num_slots = whole_slots(*sizes, self._page.slot_bytes)
        if most_slots is not None:
            num_slots = min(num_slots, most_slots)
        self._cut(num_slots)
        return num_slots

    def read_headers(self, num_slots: int) -> bytes:
        """The headers of slots 0 .. num_slots - 1. Raises OSError (EIO) when the file ends before."""
        found = bytearray(num_slots * HEADER_BYTES)
        if self._files.read(self._headers, memoryview(found), PAGE_BYTES) != len(found):
            raise OSError(errno.EIO, "the headers file was cut while it was read")
        return bytes(found)

    def read_body(self, slot: int, into: memoryview) -> int:
        """Fills `into` (slot_bytes, on page boundaries); returns how many bytes there were."""
        return self._files.read(self._bodies, into, slot * self._page.slot_bytes)

    def write_body(self, slot: int, body: memoryview) -> None:
        """body: slot_bytes, on page boundaries"""
        self._files.write(self._bodies, body, slot * self._page.slot_bytes)

    def write_header(self, slot: int, header: bytes) -> None:
        self._files.write(self._headers, header, header_offset(slot))

    def grow(self, old_slots: int, num_slots: int) -> None:
        """Takes room on the disk for more slots; where there is not enough, OSError, and all is as before."""
        try:
            self._files.allocate(self._headers, header_offset(num_slots))
            self._files.allocate(self._bodies, num_slots * self._page.slot_bytes)
        except OSError:
            self._cut(old_slots)
            raise

    def sync(self) -> None:
        """Returns when all that was written before is on the disk."""
        self._files.sync(self._bodies)
        self._files.sync(self._headers)

    def is_still_there(self) -> bool:
        """Whether the open files are those that lie in the folder."""
        at = self._files.is_at
        return at(self._headers, self._folder / HEADERS) and at(self._bodies, self._folder / BODIES)

    def probe(self, scratch: memoryview) -> None:
        """Reads and writes what is there anyhow. Raises OSError while the disk cannot."""
        self._files.write(self._headers, pack_set_page(self._page), 0)
        self.sync()
        self._files.read(self._bodies, scratch[:PAGE_BYTES], 0)

    def _cut(self, num_slots: int) -> None:
        for fd, num_bytes in (
            (self._headers, header_offset(num_slots)),
            (self._bodies, num_slots * self._page.slot_bytes),
        ):
            if self._files.size(fd) > num_bytes:
                self._files.truncate(fd, num_bytes)

    def _open_bodies(self) -> tuple[int, IoMode]:
        path = self._folder / BODIES
        try:
            return self._files.open(path, os.O_RDWR | os.O_DIRECT), "direct"
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        _log.warning("%s: this file system has no O_DIRECT; blocks go through the page cache", path)
        return self._files.open(path, os.O_RDWR), "buffered"


def make_set(files: DiskFiles, folder: Path, page: SetPage) -> None:
    """An empty set in `folder`, which does not exist yet: there whole or not at all."""
    unfinished = folder.with_name(f"{folder.name}.tmp")
    files.remove(unfinished)
    files.make_folder(unfinished)
    for name, content in ((HEADERS, pack_set_page(page)), (BODIES, b"")):
        fd = files.open(unfinished / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            files.write(fd, content, 0)
            files.sync(fd)
        finally:
            files.close(fd)
    files.rename(unfinished, folder)
