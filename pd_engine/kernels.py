"""The attention kernels there are, by name."""

from __future__ import annotations

from pd_core.errors import ConfigError
from pd_engine.attention import AttentionKernel
from pd_engine.attention_sdpa import SdpaKernel
from pd_engine.attention_tiled import TiledKernel

DEFAULT_KERNEL = "sdpa"


def kernels() -> dict[str, AttentionKernel]:
    """Every kernel: the fast one first, then the one that is easy to read."""
    return {kernel.name: kernel for kernel in (SdpaKernel(), TiledKernel())}


def kernel_named(name: str) -> AttentionKernel:
    """Raises ConfigError naming the kernels there are."""
    found = kernels()
    if name not in found:
        raise ConfigError(f"no attention kernel {name!r}; there are {', '.join(found)}", param="engine.kernel")
    return found[name]
