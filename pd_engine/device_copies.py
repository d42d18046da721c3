"""Copies between a pool on a device and slots of host memory: on CUDA beside the steps, elsewhere on the spot.

See pd_core.device_copies. On CUDA the slots are pinned, each direction has a stream of its own, and an event says when
a copy has ended. Neither stream waits for the one that steps run on: an engine leaves a step only when the device has
(see TorchEngine), and nobody has blocks copied that a step writes into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pd_core.device_copies import DeviceCopies, RunningCopy
from pd_core.errors import EngineError
from pd_core.memory import BlockMemory
from pd_engine.pool import KvPool

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


def copies_for(pool: KvPool, memory: BlockMemory) -> DeviceCopies:
    """Between the pool, wherever it lies, and the slots of `memory`. Raises EngineError when they cannot be pinned."""
    slots = slots_like(pool, memory)
    return CudaCopies(pool.blocks, slots) if pool.device.type == "cuda" else HostCopies(pool.blocks, slots)


def slots_like(pool: KvPool, memory: BlockMemory) -> Tensor:
    """The memory's blocks as rows of the pool's kind. Raises EngineError when their sizes differ."""
    if memory.block_bytes != pool.layout.block_bytes:
        raise EngineError(f"a block is {pool.layout.block_bytes} bytes, a slot of the ring has {memory.block_bytes}")
    return torch.frombuffer(memory.buffer, dtype=pool.blocks.dtype).view(memory.num_blocks, -1)


class HostCopies:
    """A copy has ended when it is started."""

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self._blocks = blocks
        self._slots = slots

    def start_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> RunningCopy:
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._slots[slot].copy_(self._blocks[block_id])
        return _Ended()

    def start_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> RunningCopy:
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._blocks[block_id].copy_(self._slots[slot])
        return _Ended()

    def close(self) -> None:
        """Views go with us."""
        self._blocks = self._slots = torch.empty(0)


class _Ended:
    def wait(self) -> None:
        """There is nothing to wait for."""


class CudaCopies:
    """Raises EngineError when the slots cannot be pinned, and wherever the device fails."""

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self._blocks = blocks
        self._slots = slots
        self._outward = _new_stream(blocks.device)
        self._inward = _new_stream(blocks.device)
        num_bytes = slots.numel() * slots.element_size()
        code = int(_cudart().cudaHostRegister(slots.data_ptr(), num_bytes, _PORTABLE))
        if code != 0:
            raise EngineError(f"{num_bytes / 2**20:.0f} MiB of the ring cannot be pinned: CUDA error {code}")

    def start_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> RunningCopy:
        sources = [self._blocks[block_id] for block_id in block_ids]
        return self._start(self._outward, sources, [self._slots[slot] for slot in slots])

    def start_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> RunningCopy:
        sources = [self._slots[slot] for slot in slots]
        return self._start(self._inward, sources, [self._blocks[block_id] for block_id in block_ids])

    def close(self) -> None:
        code = int(_cudart().cudaHostUnregister(self._slots.data_ptr()))
        self._blocks = self._slots = torch.empty(0)
        if code != 0:
            raise EngineError(f"the ring cannot be unpinned: CUDA error {code}")

    def _start(self, stream: torch.cuda.Stream, sources: list[Tensor], targets: list[Tensor]) -> RunningCopy:
        # Blocking: who waits for it leaves the core to others.
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
                ended.record(stream)
        except RuntimeError as error:
            raise EngineError(f"no copy could be started: {error}") from error
        return _CudaCopy(ended)


class _CudaCopy:
    def __init__(self, ended: torch.cuda.Event) -> None:
        self._ended = ended

    def wait(self) -> None:
        try:
            self._ended.synchronize()
        except RuntimeError as error:
            raise EngineError(f"a copy failed: {error}") from error


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
