"""One tensor of a GGUF file as the numbers that a conversion stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

from pd_model.stored_type import NUMPY_TYPES, Stored, StoredType, to_bfloat16

_Type = gguf.GGMLQuantizationType

STORED_AS: dict[Any, StoredType] = {
    _Type.F32: "F32",
    _Type.F16: "F16",
    _Type.BF16: "BF16",
    # quantised: dequantised in float32, rounded once (see `pd_model.cache`)
    _Type.Q4_0: "BF16",
    _Type.Q4_1: "BF16",
    _Type.Q5_0: "BF16",
    _Type.Q5_1: "BF16",
    _Type.Q8_0: "BF16",
    _Type.Q4_K: "BF16",
    _Type.Q5_K: "BF16",
    _Type.Q6_K: "BF16",
}
"""The tensor types that are read, and what each is stored as."""

SLICE_NUMBERS = 1 << 22
"""Numbers that are in float32 at a time."""


def read_stored(tensor: gguf.ReaderTensor) -> Stored:
    """The tensor's numbers as STORED_AS says: [out, in] for matrices."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    stored = STORED_AS[tensor.tensor_type]
    if tensor.tensor_type in (_Type.F32, _Type.F16, _Type.BF16):
        return np.asarray(tensor.data).view(NUMPY_TYPES[stored]).reshape(shape)
    return _in_slices(tensor, lambda rows: to_bfloat16(gguf.dequantize(rows, tensor.tensor_type))).reshape(shape)


def _in_slices(tensor: gguf.ReaderTensor, convert: Callable[[Stored], Stored]) -> Stored:
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(1, SLICE_NUMBERS // int(tensor.shape[0]))
    made = np.empty((rows.shape[0], int(tensor.shape[0])), np.uint16)
    for begin in range(0, rows.shape[0], step):
        made[begin : begin + step] = convert(np.asarray(rows[begin : begin + step]))
    return made
