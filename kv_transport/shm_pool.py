"""A pool as a file without a name (memfd), and another process's view of it.

    | block 0 | block 1 | ... | (to the end of the page) | label: magic, nonce, num_blocks, block_bytes |

The file is sealed: its size can never change, so that no reader is ever killed by a page that is gone, and nobody but
the process that made it can write to it, however they open it. It lives as long as somebody has it open or mapped:
nothing is left after kill -9, and it is no matter of /dev/shm, whose size is limited.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pd_core.errors import ProtocolError
from pd_core.memory import BlockMemory

NONCE_BYTES = 16
HUGE_PAGE_BYTES = 2 << 20
MAX_GAP_PAGES = 64
Block: TypeAlias = NDArray[np.uint8]
"""Bytes of one block, in one dimension."""
FIXED_SIZE = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10  # not in Python's fcntl yet
_TMPFS_MAGIC = 0x01021994
_MAGIC = b"KVRPOOL1"
_LABEL = struct.Struct(f"<8s{NONCE_BYTES}sQQ")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedBlockMemory(BlockMemory, Protocol):
    """A pool that other processes of the host can be given to read."""

    @property
    def fd(self) -> int:
        """Of the pool's file."""
        ...

    @property
    def nonce(self) -> bytes:
        """As in the file's label; no other pool has it."""
        ...


class PoolFile:
    """A new pool of our own, zero at first; `fd` is its file, `blocks` its bytes. `fd` is the owner's to close.

    Pages are taken from the machine as they are first used, huge ones where the kernel has them to give. They are
    mapped until the last view of `blocks` has gone.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        size = _file_bytes(num_blocks, block_bytes)
        self.fd = os.memfd_create("kvrelay-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            pages = map_shared(self.fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
            label = _LABEL.pack(_MAGIC, self.nonce, num_blocks, block_bytes)
            pages[size - mmap.PAGESIZE : size - mmap.PAGESIZE + len(label)] = label
            # Ours is the last mapping that may write.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FIXED_SIZE | _F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        self.blocks = pages[: num_blocks * block_bytes]


class ForeignPool:
    """Another process's pool, to be read. Raises ProtocolError for a file that is not what its sender says of it.

    fd: of the pool's file; may be closed when the pool has been made
    num_blocks, block_bytes, nonce: what the sender says
    Mapped until the object and the last view of a block have gone.
    """

    def __init__(self, fd: int, num_blocks: int, block_bytes: int, nonce: bytes) -> None:
        size = _file_bytes(num_blocks, block_bytes)
        _check_file(fd, size)
        pages = map_shared(fd, size, mmap.PROT_READ).toreadonly()
        label = _LABEL.unpack_from(pages, size - mmap.PAGESIZE)
        if label != (_MAGIC, nonce, num_blocks, block_bytes):
            del pages  # also for whoever keeps the error
            raise ProtocolError("the file is not the pool that was announced: its label says something else")
        self.num_blocks = num_blocks
        self._rows = block_rows(pages, num_blocks, block_bytes)

    def block(self, block_id: int) -> Block:
        """The bytes of one block, read-only. Raises ProtocolError outside 0 <= block_id < num_blocks."""
        if not 0 <= block_id < self.num_blocks:
            raise ProtocolError(f"block {block_id} of a pool of {self.num_blocks}")
        block: Block = self._rows[block_id]
        return block


def block_rows(pages: memoryview, num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """A pool's blocks as rows: one is had at less cost than as a piece of the memory, and copied too."""
    whole: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
    return whole[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)


def copy_block(source: Block, into: Block) -> None:
    """Copies one block; the interpreter lock is released meanwhile, which a slice assignment would not do."""
    into[...] = source


def map_shared(fd: int, size: int, protection: int) -> memoryview:
    """The file's first `size` bytes, where huge pages can be mapped as such. Raises OSError.

    Unlike mmap.mmap it keeps no file open, and goes by itself when the last view of it, an array's for instance, has
    gone.
    """
    # A kernel that itself makes no huge pages of shared memory does not align it for them either. And a copy is a third
    # slower where source and target lie a multiple of 256 MiB apart, as mappings like to: so they get a random gap.
    gap = secrets.randbelow(MAX_GAP_PAGES) * HUGE_PAGE_BYTES
    room = gap + size + HUGE_PAGE_BYTES
    reserved = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    _unmap(reserved, address)
    _unmap(end, reserved + room)
    try:
        _map(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _unmap(address, end)
        raise
    _libc.madvise(address, size, mmap.MADV_HUGEPAGE)  # a kernel without huge pages: the pool works in small ones
    pages = (ctypes.c_char * size).from_address(address)
    unmap = weakref.finalize(pages, _libc.munmap, address, size)
    unmap.atexit = False  # at the end of the process other threads may still be inside
    return memoryview(pages).cast("B")


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, fd, 0)
    if mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{size} bytes of shared memory cannot be mapped")
    return int(mapped)


def _unmap(begin: int, end: int) -> None:
    if begin < end:
        _libc.munmap(begin, end - begin)


def _file_bytes(num_blocks: int, block_bytes: int) -> int:
    """Blocks up to a whole page, and the label's page."""
    return (-(-num_blocks * block_bytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE


def _check_file(fd: int, size: int) -> None:
    """Raises ProtocolError unless reading every byte of the file is safe for as long as it is mapped."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"what came is no memfd: {error}") from error
    if seals & FIXED_SIZE != FIXED_SIZE:
        raise ProtocolError(f"the pool's file could change its size: it has the seals {seals:#x}")
    if os.fstat(fd).st_size != size:
        raise ProtocolError(f"the pool's file has {os.fstat(fd).st_size} bytes, {size} were announced")
    # A page of a file of reserved huge pages (hugetlbfs) may turn out not to exist when it is read.
    if _file_system(fd) != _TMPFS_MAGIC:
        raise ProtocolError("the pool's file does not lie in ordinary shared memory")


def _file_system(fd: int) -> int:
    """The magic number of the file system that the file lies in."""
    buffer = (ctypes.c_long * 32)()  # struct statfs, whose first field it is
    if _libc.fstatfs(fd, ctypes.byref(buffer)):
        raise OSError(ctypes.get_errno(), "fstatfs")
    return int(buffer[0])
