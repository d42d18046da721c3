"""The number types in which weights are stored, as numpy holds them, and rounding to bfloat16.

numpy has no bfloat16: such numbers are held as their bits, in uint16. They are the upper halves of float32s.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

StoredType = Literal["F32", "F16", "BF16"]
"""By the names that safetensors gives them."""

Stored: TypeAlias = npt.NDArray[Any]
"""Numbers of a StoredType: float32, float16, or uint16 for the bits of bfloat16."""

NUMPY_TYPES: dict[StoredType, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
TYPE_BYTES: dict[StoredType, int] = {"F32": 4, "F16": 2, "BF16": 2}

_NAN_BITS = np.uint32(0x7FC0)
_HALF = np.uint32(0x7FFF)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16s, ties to even: what torch makes of the same float32s. Any NaN is one NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (_HALF + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), _NAN_BITS, rounded).astype(np.uint16)


def to_float32(stored: Stored) -> npt.NDArray[np.float32]:
    """Exactly the same numbers: every float16 and bfloat16 is a float32 too."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)
