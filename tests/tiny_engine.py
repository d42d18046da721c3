"""A Llama of two layers with random weights: the real arithmetic at a cost that lets tests run thousands of rows.

Its sizes are odd on purpose: heads that share, a vocabulary and widths that are no multiples of a vector.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from pd_core.layout import DType, Fingerprint
from pd_engine.decoder import Decoder
from pd_engine.invariance import InvarianceProof
from pd_engine.kernels import DEFAULT_KERNEL, kernel_named
from pd_engine.loader import torch_layout
from pd_engine.numerics import numerics_id
from pd_engine.pool import KvPool, torch_dtype
from pd_engine.scratch import ScratchMemory
from pd_engine.torch_engine import TorchEngine
from pd_engine.weights import read_weights
from pd_model.manifest import ModelManifest, tensor_shapes

TINY_MANIFEST = ModelManifest(
    architecture="llama",
    num_layers=2,
    hidden_size=48,
    intermediate_size=83,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    vocab_size=131,
    context_tokens=1200,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tied_embeddings=False,
    eos_token_ids=[0],
    bos_token_id=None,
)


def write_tiny_weights(path: Path, manifest: ModelManifest, seed: int) -> None:
    """A float32 safetensors file of random weights for `manifest`, the same for the same seed."""
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(manifest).items():
        random = torch.randn(shape, generator=source)
        # matrices keep the size of what they multiply; attention is left sharp enough to tell positions apart
        tensors[name] = random.mul(0.1).add(1.0) if len(shape) == 1 else random.mul(1.5 / math.sqrt(shape[1]))
    save_file(tensors, path)


def tiny_decoder(path: Path, manifest: ModelManifest, dtype: DType, kernel: str) -> Decoder:
    """A decoder over the weights at `path`. Raises ConfigError for an unknown kernel."""
    return Decoder(manifest, read_weights(path, manifest, torch_dtype(dtype)), kernel_named(kernel))


def engine_over(decoder: Decoder, dtype: DType, num_blocks: int, num_threads: int) -> TorchEngine:
    """An engine with a pool of its own and no proof: for tests that are themselves the proof."""
    layout = torch_layout(decoder.manifest, dtype)
    numerics = numerics_id(decoder.kernel, dtype)
    fingerprint = Fingerprint("tiny", "tiny", "tiny", numerics, layout)
    proof = InvarianceProof(numerics, "tiny", [], "nothing was tried")
    pool = KvPool(ScratchMemory(num_blocks, layout.block_bytes), layout)
    return TorchEngine(decoder, pool, fingerprint, proof, num_threads)


def tiny_engine(
    folder: Path, dtype: DType, *, num_blocks: int, num_threads: int = 1, kernel: str = DEFAULT_KERNEL
) -> TorchEngine:
    """An engine over TINY_MANIFEST's random weights, which are written into `folder`."""
    path = folder / "tiny.safetensors"
    write_tiny_weights(path, TINY_MANIFEST, seed=1)
    return engine_over(tiny_decoder(path, TINY_MANIFEST, dtype, kernel), dtype, num_blocks, num_threads)
