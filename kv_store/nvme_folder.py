"""The tier's folder: its lock, our set in it, and what else lies there.

<folder>/lock                     locked (flock) by the one process that uses the folder
<folder>/v1-<set id in hex>/      a set: headers, bodies
<folder>/v1-<set id in hex>.tmp/  a set that was not finished: swept at start
anything else                     a stranger's: counted, never touched
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kv_store.nvme_files import DiskFiles
from kv_store.nvme_room import OtherSet, Quarters
from kv_store.nvme_set import HEADERS
from kv_store.slot_format import FORMAT_VERSION, PAGE_BYTES, SetPage
from pd_core.errors import Unavailable

LOCK = "lock"
OVERHEAD_BYTES = 4 * PAGE_BYTES
"""This folder and our set's, the rest of `headers`' last page, and the file system's first note of extents."""
_SET_NAME = re.compile(r"v[0-9]+-[0-9a-f]{32}")


def set_name(page: SetPage) -> str:
    """Of the folder that holds the set."""
    return f"v{FORMAT_VERSION}-{page.set_id.hex()}"


class StoreFolder:
    """The folder, locked. Raises Unavailable when another process has it, OSError when the disk does not let us in."""

    def __init__(self, files: DiskFiles, path: Path) -> None:
        self._files = files
        self._path = path
        files.make_folder(path)
        self._lock = files.open(path / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            self._take_lock()
        except BaseException:
            files.close(self._lock)
            raise

    def close(self) -> None:
        """Another process may use the folder."""
        self._files.close(self._lock)

    def is_still_ours(self) -> bool:
        """Whether the lock lies where others look for it."""
        return self._files.is_at(self._lock, self._path / LOCK)

    def sweep(self) -> list[str]:
        """Removes sets that were never finished; returns their names."""
        swept = [
            name
            for name in self._files.names(self._path)
            if name.endswith(".tmp") and _SET_NAME.fullmatch(name.removesuffix(".tmp"))
        ]
        for name in swept:
            self._files.remove(self._path / name)
        return swept

    def look_around(self, ours: str) -> Quarters:
        """What lies here beside the set `ours`."""
        others: list[OtherSet] = []
        stranger_bytes = OVERHEAD_BYTES
        for name in self._files.names(self._path):
            try:
                if name == ours:
                    continue
                num_bytes = self._files.taken_bytes(self._path / name)
                if _SET_NAME.fullmatch(name):
                    others.append(OtherSet(name, num_bytes, self._used_s(name)))
                else:
                    stranger_bytes += num_bytes
            except FileNotFoundError:
                continue  # it went while we looked
        return Quarters(tuple(others), stranger_bytes)

    def remove_set(self, name: str) -> None:
        """Raises ValueError for a name that is no set's."""
        if not _SET_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no set")
        self._files.remove(self._path / name)

    def _used_s(self, name: str) -> float:
        try:
            return self._files.used_s(self._path / name / HEADERS)
        except (FileNotFoundError, NotADirectoryError):
            return self._files.used_s(self._path / name)

    def _take_lock(self) -> None:
        found = bytearray(32)
        if not self._files.lock(self._lock):
            num_read = self._files.read(self._lock, memoryview(found), 0)
            holder = bytes(found[:num_read]).decode("ascii", "replace").strip() or "unknown"
            raise Unavailable(f"{self._path} is in use by process {holder}")
        self._files.write(self._lock, f"{os.getpid():<16}\n".encode(), 0)
