"""What the model needs of a worker's memory. Reads the manifest alone: no torch here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cluster.sizes import ModelSize
from pd_core.config import Config
from pd_core.errors import ModelError
from pd_core.layout import BlockLayout, DType
from pd_engine.fake import FAKE_LAYOUT
from pd_model.fake import FAKE_NAME
from pd_model.folder import open_model
from pd_model.manifest import ModelManifest
from pd_model.weight_size import weights_bytes


def measure_model(config: Config, cache_dir: Path, progress: Callable[[str, float], None]) -> ModelSize:
    """Opens the model, which converts it the first time.

    Raises ModelError when it cannot be served; of one that the config names, its `param` is the setting.
    """
    if config.model.path == FAKE_NAME:
        context_tokens = config.model.fake.context_tokens
        return ModelSize(FAKE_NAME, FAKE_LAYOUT.block_bytes, weights_bytes=0, context_tokens=context_tokens)
    try:
        model = open_model(config.model.path, cache_dir, progress)
    except ModelError as error:
        raise with_setting(error, config) from error
    return size_of(model.name, model.manifest, config.model.dtype, config.model.weights)


def with_setting(error: ModelError, config: Config) -> ModelError:
    """The error with the setting that brought the model in, if there is one: whoever reads it can change that."""
    if config.model.path is None or error.param is not None:
        return error
    return ModelError(f"--model / model.path {config.model.path}: {error.message}", param="model.path")


def size_of(name: str, manifest: ModelManifest, dtype: DType, weights: Literal["dtype", "int8"] = "dtype") -> ModelSize:
    """Sizes of a real model."""
    layout = BlockLayout("", manifest.num_layers, manifest.num_kv_heads, manifest.head_dim, dtype)
    return ModelSize(
        name=name,
        block_bytes=layout.block_bytes,
        weights_bytes=weights_bytes(manifest, dtype, weights),
        context_tokens=manifest.context_tokens,
    )
