"""Reading and writing safetensors files, one tensor at a time.

The safetensors library wants all tensors in memory to write them and cannot give bfloat16 to numpy; a conversion needs
neither more than one tensor at a time nor anything but float32 out.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pd_core.errors import ModelError

TYPE_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in a file's header; data_offsets count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


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


def read_float32(path: Path, name: str, entry: TensorEntry, data_start: int) -> npt.NDArray[np.float32]:
    """One tensor, exactly: every F16 and BF16 value is a float32 value too. Raises ModelError for other dtypes."""
    if entry.dtype not in TYPE_BYTES:
        raise ModelError(f"tensor {name} in {path} is {entry.dtype}; only {', '.join(TYPE_BYTES)} are supported")
    begin, end = entry.data_offsets
    if end - begin != prod(entry.shape) * TYPE_BYTES[entry.dtype]:
        raise ModelError(f"tensor {name} in {path} has {end - begin} bytes, which is not its shape {entry.shape}")
    with path.open("rb") as file:
        file.seek(data_start + begin)
        raw = file.read(end - begin)
    if entry.dtype == "F32":
        flat = np.frombuffer(raw, "<f4")
    elif entry.dtype == "F16":
        flat = np.frombuffer(raw, "<f2").astype(np.float32)
    else:  # bfloat16 is the upper half of a float32
        flat = (np.frombuffer(raw, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return flat.reshape(entry.shape)


def write_float32(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], npt.NDArray[np.float32]],
    written: Callable[[int, int], None],
) -> str:
    """Writes the tensors in order of their names, with what `read` gives for each. Returns the file's digest (hex).

    The same tensors give the same bytes anywhere, so the digest names the weights.
    `written(bytes so far, bytes in all)` is called after each tensor. The file is on the disk (fsync) at return.
    Raises ModelError for a tensor of the wrong shape.
    """
    header: dict[str, TensorEntry] = {}
    total_bytes = 0
    for name in sorted(shapes):
        end = total_bytes + 4 * prod(shapes[name])
        header[name] = TensorEntry("F32", list(shapes[name]), (total_bytes, end))
        total_bytes = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.blake2b(digest_size=16)
    with path.open("wb") as file:
        for prefix in (len(encoded).to_bytes(8, "little"), encoded):
            file.write(prefix)
            digest.update(prefix)
        for name, entry in header.items():
            tensor = read(name)
            if tensor.shape != tuple(shapes[name]):
                raise ModelError(f"tensor {name} has shape {tensor.shape}; this model needs {shapes[name]}")
            data = np.ascontiguousarray(tensor, "<f4").reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
            written(entry.data_offsets[1], total_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
