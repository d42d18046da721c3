"""What the model needs of a worker's memory. Reads the manifest alone: no torch here."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

from cluster.sizes import ModelSize
from pd_core.config import Config
from pd_core.layout import DTYPE_BYTES, BlockLayout, DType
from pd_engine.fake import FAKE_LAYOUT
from pd_model.fake import FAKE_NAME
from pd_model.folder import open_model
from pd_model.manifest import ModelManifest, tensor_shapes


def measure_model(config: Config, cache_dir: Path, progress: Callable[[str, float], None]) -> ModelSize:
    """Opens the model, which converts it the first time. Raises ModelError when it cannot be served."""
    if config.model.path == FAKE_NAME:
        context_tokens = config.model.fake.context_tokens
        return ModelSize(FAKE_NAME, FAKE_LAYOUT.block_bytes, weights_bytes=0, context_tokens=context_tokens)
    model = open_model(config.model.path, cache_dir, progress)
    return size_of(model.name, model.manifest, config.model.dtype)


def size_of(name: str, manifest: ModelManifest, dtype: DType) -> ModelSize:
    """Sizes of a real model."""
    layout = BlockLayout("", manifest.num_layers, manifest.num_kv_heads, manifest.head_dim, dtype)
    num_weights = sum(prod(shape) for shape in tensor_shapes(manifest).values())
    return ModelSize(
        name=name,
        block_bytes=layout.block_bytes,
        weights_bytes=num_weights * DTYPE_BYTES[dtype],
        context_tokens=manifest.context_tokens,
    )
