"""What a disk thread does for one block. It works in its own buffer: a caller's memory is touched only while the caller
still waits, and only for as long as a copy takes, however long the disk does."""

from __future__ import annotations

import enum
import threading

import numpy as np

from kv_store.nvme_set import SlotFiles
from kv_store.slot_format import EMPTY_HEADER, SlotHeader, pack_header
from kv_transport.digest import block_digest
from kv_transport.shm_pool import copy_block


class Claim:
    """Whether threads may touch a caller's memory. The caller revokes it when it stops waiting."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._num_copying = 0
        self.is_revoked = False

    def copy(self, source: memoryview, into: memoryview) -> bool:
        """Copies, unless the claim is revoked: then False, and nothing is touched."""
        with self._change:
            if self.is_revoked:
                return False
            self._num_copying += 1
        try:
            copy_block(np.frombuffer(source, np.uint8), np.frombuffer(into, np.uint8))
        finally:
            with self._change:
                self._num_copying -= 1
                self._change.notify()
        return True

    def revoke(self) -> None:
        """When it returns nobody touches the memory any more. It waits for copies in memory at most."""
        with self._change:
            self.is_revoked = True
            self._change.wait_for(lambda: self._num_copying == 0)


class BlockResult(enum.Enum):
    """How it went."""

    DONE = "done"
    CORRUPT = "corrupt"  # the bytes are not those of the digest
    ABANDONED = "abandoned"  # nobody waited any more


def read_block(
    disk: SlotFiles, slot: int, header: SlotHeader, into: memoryview, claim: Claim, buffer: memoryview
) -> BlockResult:
    """Reads, compares, and only then copies to the caller. Raises OSError."""
    if claim.is_revoked:
        return BlockResult.ABANDONED
    num_read = disk.read_body(slot, buffer)
    block = buffer[: header.num_bytes]
    if num_read < header.num_bytes or block_digest(block) != header.digest:
        return BlockResult.CORRUPT
    return BlockResult.DONE if claim.copy(block, into) else BlockResult.ABANDONED


def write_block(
    disk: SlotFiles,
    slot: int,
    header: SlotHeader,
    set_id: bytes,
    replaces: bool,
    block: memoryview,
    claim: Claim,
    buffer: memoryview,
) -> BlockResult:
    """Copies and compares, then body, then header. `replaces`: the slot's old header goes first. Raises OSError.

    After anything but DONE the slot's header, old or new, may be on the disk.
    """
    if not claim.copy(block, buffer[: header.num_bytes]):
        return BlockResult.ABANDONED
    if block_digest(buffer[: header.num_bytes]) != header.digest:
        return BlockResult.CORRUPT
    if header.num_bytes < len(buffer):
        buffer[header.num_bytes :] = bytes(len(buffer) - header.num_bytes)
    if replaces:
        disk.write_header(slot, EMPTY_HEADER)
    disk.write_body(slot, buffer)
    disk.write_header(slot, pack_header(header, slot, set_id))
    return BlockResult.DONE


def wipe_slot(disk: SlotFiles, slot: int, erases_body: bool, buffer: memoryview) -> None:
    """Makes the header empty, and the body zeros where it must not stay. Raises OSError."""
    disk.write_header(slot, EMPTY_HEADER)
    if erases_body:
        buffer[:] = bytes(len(buffer))
        disk.write_body(slot, buffer)
