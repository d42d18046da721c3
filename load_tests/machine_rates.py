"""The machine's own bounds. Runs inside an engine process, on its cores.

    read    a sum over 300 MiB, far more than any cache: bytes in a second
    gemm    torch's linear layers at the model's four shapes, 2,048 rows, the model's dtype: operations in a second
    memcpy  one thread, 256 MiB from one place to another: bytes copied in a second
    digest  xxh3-64 block by block, as the workers do it, over blocks that no cache holds any more: bytes in a second

torch is imported here because its GEMMs are the yardstick; nothing else of the load tests does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_transport.digest import block_digest
from load_tests.engine_messages import MeasureRate, RateName
from load_tests.floor import ModelShape
from pd_core.layout import BLOCK_TOKENS

GEMM_ROWS = 2048
NUM_GEMM_LAYERS = 4
"""Layers with weights of their own, so that a weight is not in the cache because it has just been used."""
READ_BYTES = 300 << 20
COPY_BYTES = 256 << 20
DIGEST_BYTES = 128 << 20
DEFAULT_BLOCK_BYTES = 360 << 10
"""A block of the embedded model, where the model in use has none worth a measurement."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}


class MachineRates:
    """Each buffer is made when it is first needed, and kept."""

    def __init__(self) -> None:
        self._made: dict[tuple[RateName, ModelShape | None], tuple[Callable[[], object], int]] = {}

    def measure(self, question: MeasureRate) -> list[float]:
        """Operations or bytes a second, one number for each time. Raises ValueError for "gemm" without a model."""
        torch.set_num_threads(question.num_threads)
        key = (question.name, question.shape)
        if key not in self._made:
            self._made[key] = _make(question.name, question.shape)
        run, amount = self._made[key]
        run()  # the first time pays for pages, threads and cold caches
        rates = []
        for _ in range(question.num_times):
            began_s = time.perf_counter()
            run()
            rates.append(amount / (time.perf_counter() - began_s))
        return rates


def _make(name: RateName, shape: ModelShape | None) -> tuple[Callable[[], object], int]:
    """What to run, and how many bytes or operations one run is."""
    match name:
        case "read":
            numbers = torch.ones(READ_BYTES // 8, dtype=torch.float64)
            return numbers.sum, READ_BYTES
        case "gemm":
            if shape is None:
                raise ValueError("a model without matrices has no GEMM rate")
            return _make_gemm(shape)
        case "memcpy":
            source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
            return lambda: target.copy_(source), COPY_BYTES
        case "digest":
            return _make_digest(BLOCK_TOKENS * shape.kv_token_bytes if shape is not None else DEFAULT_BLOCK_BYTES)


def _make_gemm(shape: ModelShape) -> tuple[Callable[[], object], int]:
    dtype = DTYPES[shape.number_bytes]
    rows = {inputs: torch.randn(GEMM_ROWS, inputs).to(dtype) for inputs, _ in shape.gemms}
    weights: list[tuple[Tensor, Tensor]] = [
        (rows[inputs], (torch.randn(outputs, inputs) * 0.05).to(dtype))
        for _ in range(NUM_GEMM_LAYERS)
        for inputs, outputs in shape.gemms
    ]

    def run() -> None:
        with torch.no_grad():
            for row, weight in weights:
                torch.nn.functional.linear(row, weight)

    return run, NUM_GEMM_LAYERS * sum(2 * GEMM_ROWS * inputs * outputs for inputs, outputs in shape.gemms)


def _make_digest(block_bytes: int) -> tuple[Callable[[], object], int]:
    num_blocks = max(DIGEST_BYTES // block_bytes, 1)
    blocks: NDArray[np.uint8] = torch.randint(0, 256, (num_blocks * block_bytes,), dtype=torch.uint8).numpy()
    view = blocks.data

    def run() -> None:
        for start in range(0, len(view), block_bytes):
            block_digest(view[start : start + block_bytes])

    return run, num_blocks * block_bytes
