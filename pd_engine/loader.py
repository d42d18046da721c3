"""From a model folder and a pool's memory to a running engine."""

from __future__ import annotations

from pathlib import Path

from pd_core.layout import BlockLayout, DType, Fingerprint
from pd_core.memory import BlockMemory
from pd_engine.attention import AttentionKernel
from pd_engine.decoder import Decoder
from pd_engine.engine import TorchEngine, use_threads
from pd_engine.invariance import proven
from pd_engine.kernels import DEFAULT_KERNEL, kernel_named
from pd_engine.numerics import numerics_id
from pd_engine.pool import LAYOUT_NAME, KvPool, torch_dtype
from pd_engine.weights import read_weights
from pd_model.folder import ModelFolder
from pd_model.manifest import ModelManifest


def layout_for(manifest: ModelManifest, dtype: DType) -> BlockLayout:
    """How this engine stores KV: what a worker needs before it can allocate its pool."""
    return BlockLayout(
        name=LAYOUT_NAME,
        num_layers=manifest.num_layers,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        dtype=dtype,
    )


def fingerprint_for(folder: ModelFolder, dtype: DType, kernel: str = DEFAULT_KERNEL) -> Fingerprint:
    """The fingerprint of an engine that `load_engine` would make on this machine. Reads no weights.

    Raises ConfigError for an unknown kernel.
    """
    return _fingerprint(folder, dtype, kernel_named(kernel))


def load_engine(
    folder: ModelFolder,
    dtype: DType,
    memory: BlockMemory,
    *,
    num_threads: int,
    cache_dir: Path,
    kernel: str = DEFAULT_KERNEL,
) -> TorchEngine:
    """Reads the weights, checks (or looks up) the engine's invariance, and takes `memory` as its pool.

    memory:      `layout_for(folder.manifest, dtype)` blocks
    num_threads: torch threads of every step
    cache_dir:   where the outcome of the check is kept
    Raises ConfigError (kernel), ModelError (weights), EngineError (memory does not fit the layout).
    """
    chosen = kernel_named(kernel)
    layout = layout_for(folder.manifest, dtype)
    pool = KvPool(memory, layout)
    fingerprint = _fingerprint(folder, dtype, chosen)
    use_threads(num_threads)
    weights = read_weights(folder.weights_path, folder.manifest, torch_dtype(dtype))
    decoder = Decoder(folder.manifest, weights, chosen)
    proof = proven(decoder, layout, fingerprint.numerics, folder.weights_digest, num_threads, cache_dir)
    return TorchEngine(decoder, pool, fingerprint, proof, num_threads)


def _fingerprint(folder: ModelFolder, dtype: DType, kernel: AttentionKernel) -> Fingerprint:
    return Fingerprint(
        weights=folder.weights_digest,
        settings=folder.settings_digest,
        tokenizer=folder.tokenizer_digest,
        numerics=numerics_id(kernel, dtype),
        layout=layout_for(folder.manifest, dtype),
    )
