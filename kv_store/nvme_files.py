"""Every call of the NVMe tier that reaches the disk. Tests put something in between here to break it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import Protocol

from kv_store.slot_format import PAGE_BYTES

FOLDER_MODE = 0o700
FILE_MODE = 0o600


class DiskFiles(Protocol):
    """All of them may block for as long as the disk likes, and raise OSError."""

    def open(self, path: Path, flags: int) -> int:
        """A file descriptor; a file that is made is private."""
        ...

    def close(self, fd: int) -> None: ...

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fills `into` as far as the file goes; returns the bytes read."""
        ...

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        """Writes all of it."""
        ...

    def sync(self, fd: int) -> None:
        """Returns when the data is on the disk (fdatasync)."""
        ...

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Makes the file at least so long, with room on the disk for all of it."""
        ...

    def truncate(self, fd: int, num_bytes: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def is_at(self, fd: int, path: Path) -> bool:
        """Whether the open file is what lies at the path."""
        ...

    def lock(self, fd: int) -> bool:
        """Locks the file for this process, until it is closed; False where another has."""
        ...

    def touch(self, path: Path) -> None:
        """Its time of use is now."""
        ...

    def used_s(self, path: Path) -> float:
        """Its time of use, in Unix time."""
        ...

    def exists(self, path: Path) -> bool: ...

    def device(self, path: Path) -> int:
        """The file system on which the path lies, or would."""
        ...

    def make_folder(self, path: Path) -> None:
        """A private folder, with those above it; none that exists is changed."""
        ...

    def names(self, folder: Path) -> list[str]: ...

    def taken_bytes(self, path: Path) -> int:
        """What a file, or a folder with all in it, takes of the disk or will take: holes count."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Also on the disk when it returns."""
        ...

    def remove(self, path: Path) -> None:
        """A file, or a folder with all in it; one that is not there is no error."""
        ...


class RealFiles:
    """The disk itself."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        num_read = 0
        while num_read < len(into):
            num_bytes = os.preadv(fd, [into[num_read:]], offset + num_read)
            if num_bytes == 0:
                break
            num_read += num_bytes
            if num_read % PAGE_BYTES:
                break  # the end of the file; behind it a direct read is refused
        return num_read

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            num_bytes = os.pwrite(fd, view, offset)
            view, offset = view[num_bytes:], offset + num_bytes

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, num_bytes: int) -> None:
        begin = os.fstat(fd).st_size
        if num_bytes > begin:
            os.posix_fallocate(fd, begin, num_bytes - begin)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_at(self, fd: int, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def touch(self, path: Path) -> None:
        os.utime(path)

    def used_s(self, path: Path) -> float:
        return path.stat(follow_symlinks=False).st_mtime

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def device(self, path: Path) -> int:
        there = next(above for above in (path, *path.parents) if above.exists())
        return there.stat().st_dev

    def make_folder(self, path: Path) -> None:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(FOLDER_MODE, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths

    def taken_bytes(self, path: Path) -> int:
        status = path.stat(follow_symlinks=False)
        own_bytes = status.st_blocks * 512
        if stat.S_ISDIR(status.st_mode):
            return own_bytes + sum(self.taken_bytes(path / name) for name in self.names(path))
        return max(own_bytes, status.st_size)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)
        fd = os.open(new.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        try:
            if stat.S_ISDIR(path.stat(follow_symlinks=False).st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            return
