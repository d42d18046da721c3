"""Names everything that decides the bits of KV: workers whose ids differ do not exchange blocks."""

from __future__ import annotations

import torch

from pd_core.layout import DType
from pd_engine.attention import AttentionKernel
from pd_engine.device import CPU
from pd_engine.pool import torch_dtype
from pd_engine.step_plan import ROW_MULTIPLE

_DECODER_VERSION = 1
"""Raise it when the decoder's own arithmetic changes a bit."""


def numerics_id(kernel: AttentionKernel, dtype: DType, device: torch.device = CPU) -> str:
    """One line for people and for comparison: kernel, versions, tiles, dtype, padding, torch, processor or device."""
    return "; ".join(
        (
            f"decoder {_DECODER_VERSION}",
            f"attention {kernel.name} {kernel.version}, {kernel.tile_keys} keys a tile",
            f"{dtype}, rows by {ROW_MULTIPLE[torch_dtype(dtype)]}",
            *(_processor() if device.type == "cpu" else _cuda(device)),
        )
    )


def _processor() -> tuple[str, str]:
    """Name and instruction sets: the math libraries below torch choose their code by both."""
    found = torch.cpu.get_capabilities()
    able = sorted(name for name, value in found.items() if value is True)
    name = found.get("cpu_name", found.get("architecture", "cpu"))
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}", f"{name} [{' '.join(able)}]"


def _cuda(device: torch.device) -> tuple[str, str]:
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"torch {torch.__version__} cuda {torch.version.cuda}", f"{name} [{major}.{minor}]"
