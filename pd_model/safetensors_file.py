"""Reading and writing safetensors files, one tensor at a time.

The safetensors library wants all tensors in memory to write them and cannot give bfloat16 to numpy; a conversion needs
no more than one tensor at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from pd_core.errors import ModelError
from pd_model.stored_type import NUMPY_TYPES, TYPE_BYTES, Stored, StoredType

MAX_HEADER_BYTES = 100_000_000
ALIGNMENT_BYTES = 64
"""Where a written file's data begins. Tensors of whole multiples follow each other aligned: they are used in place."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in a file's header; data_offsets count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorPlan(msgspec.Struct, frozen=True):
    """A tensor to write."""

    stored: StoredType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * TYPE_BYTES[self.stored]


def read_header(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """The tensors of a file and where its data begins. Raises ModelError for a truncated or foreign file."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise ModelError(f"{path} is not a safetensors file, or is truncated")
        raw = file.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in header.items()}
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} has a header that cannot be read: {error}") from error
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= file_bytes - 8 - length:
            raise ModelError(f"{path} is truncated: tensor {name} ends at byte {end} of its data")
    return entries, 8 + length


def stored_type(path: Path, name: str, entry: TensorEntry) -> StoredType:
    """The type of a tensor of the file at `path`. Raises ModelError for one that is not supported."""
    for stored in get_args(StoredType):
        if entry.dtype == stored:
            return stored  # type: ignore[no-any-return]
    raise ModelError(f"tensor {name} in {path} is {entry.dtype}; only {', '.join(NUMPY_TYPES)} are supported")


def read_tensor(path: Path, name: str, entry: TensorEntry, data_start: int) -> Stored:
    """One tensor as it is stored. Raises ModelError for a type that is not supported, or bytes that do not fit."""
    stored = stored_type(path, name, entry)
    begin, end = entry.data_offsets
    if end - begin != prod(entry.shape) * TYPE_BYTES[stored]:
        raise ModelError(f"tensor {name} in {path} has {end - begin} bytes, which is not its shape {entry.shape}")
    with path.open("rb") as file:
        file.seek(data_start + begin)
        raw = file.read(end - begin)
    return np.frombuffer(raw, NUMPY_TYPES[stored]).reshape(entry.shape)


def write_tensors(
    path: Path,
    plans: Mapping[str, TensorPlan],
    read: Callable[[str], Stored],
    written: Callable[[int, int], None],
) -> str:
    """Writes the tensors in order of their names, with what `read` gives for each. Returns the file's digest (hex).

    The same tensors give the same bytes anywhere, so the digest names the weights.
    `written(bytes so far, bytes in all)` is called after each tensor. The file is on the disk (fsync) at return.
    Raises ModelError for a tensor of the wrong shape or type.
    """
    header: dict[str, TensorEntry] = {}
    total_bytes = 0
    for name in sorted(plans):
        end = total_bytes + plans[name].num_bytes
        header[name] = TensorEntry(plans[name].stored, list(plans[name].shape), (total_bytes, end))
        total_bytes = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT_BYTES)
    digest = hashlib.blake2b(digest_size=16)
    with path.open("wb") as file:
        for prefix in (len(encoded).to_bytes(8, "little"), encoded):
            file.write(prefix)
            digest.update(prefix)
        for name, entry in header.items():
            tensor = _checked(name, read(name), plans[name])
            data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
            written(entry.data_offsets[1], total_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _checked(name: str, tensor: Stored, plan: TensorPlan) -> Stored:
    if tensor.shape != plan.shape:
        raise ModelError(f"tensor {name} has shape {tensor.shape}; this model needs {plan.shape}")
    if tensor.dtype != np.dtype(NUMPY_TYPES[plan.stored]):
        raise ModelError(f"tensor {name} is {tensor.dtype}, which is not {plan.stored}")
    return tensor
