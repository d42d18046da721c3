"""Weights in 8 bits: each row as whole numbers from -127 to 127 times a scale of its own.

Symmetric, nearest, a scale a row; what that costs in perplexity is in docs/adr/0008-weights-in-8-bits.md. The embedding
stays as it is: nothing would be gained by a smaller table to look up in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pd_core.errors import ModelError

QUANTISER_VERSION = 1
"""Raise it when the same weights would become other numbers."""

MOST = 127
_LEAST_SCALE = 2.0**-126
"""The smallest normal float: a row of smaller numbers must not be divided by zero."""


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """numbers: int8 [rows, cols]; scales: float32 [rows]; weight[i, j] is nearly numbers[i, j] * scales[i]."""

    numbers: NDArray[np.int8]
    scales: NDArray[np.float32]


def quantise_rows(weights: NDArray[Any], name: str) -> QuantisedRows:
    """weights: [rows, cols], float32, or uint16 that hold bfloat16 bit for bit

    Raises ModelError, with `name`, when a number is not finite.
    """
    tensor = torch.from_numpy(weights)
    wide = tensor.view(torch.bfloat16).float() if tensor.dtype == torch.uint16 else tensor
    highest = wide.abs().amax(dim=1)
    if not bool(torch.isfinite(highest).all()):
        raise ModelError(f"{name} has numbers that are not finite; they have no 8-bit form")
    scales = (highest / MOST).clamp_min(_LEAST_SCALE)
    # the largest number of a row may come out a rounding error above MOST: rounding takes that away
    numbers = (wide / scales[:, None]).round_()
    return QuantisedRows(numbers.to(torch.int8).numpy(), scales.numpy())
