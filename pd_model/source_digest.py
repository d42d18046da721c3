"""Names a file by its content, and remembers the name so that gigabytes are not read at every start.

The memory of a file is trusted while its device, inode, size, mtime and ctime are what they were: whatever changes
a file changes its ctime. A file that was changed a moment ago is not remembered, because it could change again
within the same tick of the clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pd_core.errors import ModelError

SETTLED_S = 3.0
"""A file whose last change is younger is not remembered. Covers file systems that keep time in 2 s steps."""


class _Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stamp: list[int]
    digest: str


def content_digest(path: Path, memory: Path) -> str:
    """Digest (hex) of a file's bytes. `memory` is the folder for what is remembered.

    Raises ModelError when the file cannot be read, or changes meanwhile.
    """
    try:
        path = path.resolve(strict=True)
        stamp = _stamp(path)
        slot = memory / hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()
        if (known := _recall(slot)) is not None and known.stamp == stamp:
            return known.digest
        digest = file_digest(path)
        if _stamp(path) != stamp:
            raise ModelError(f"{path} changed while it was read")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if time.time() - max(stamp[3], stamp[4]) / 1e9 > SETTLED_S:
        _remember(slot, _Remembered(stamp, digest))
    return digest


def files_digest(paths: Sequence[Path], memory: Path, salt: str) -> str:
    """One digest (hex) over names and contents of several files, and `salt`."""
    parts = [salt, *(f"{path.name} {content_digest(path, memory)}" for path in paths)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def file_digest(path: Path) -> str:
    """Digest (hex) of a file's bytes, read now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _recall(slot: Path) -> _Remembered | None:
    try:
        return msgspec.json.decode(slot.read_bytes(), type=_Remembered)
    except (OSError, msgspec.MsgspecError):
        return None  # never seen, or the memory cannot be used: the file itself is asked


def _remember(slot: Path, remembered: _Remembered) -> None:
    """In a cache that cannot be written, the file is read at every start instead."""
    temporary = slot.with_name(f".tmp-{slot.name}-{os.getpid()}")
    try:
        slot.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(remembered))
        temporary.replace(slot)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
