"""What the benches have to know of a model without loading it."""

from __future__ import annotations

from pathlib import Path

from load_tests.floor import ModelShape
from pd_core.config import Config
from pd_core.layout import DTYPE_BYTES
from pd_model.fake import FAKE_NAME, FAKE_VOCAB_SIZE
from pd_model.folder import open_model
from pd_model.manifest import ModelManifest


def read_shape(config: Config, cache_dir: Path) -> ModelShape | None:
    """None for the fake engine, which multiplies nothing. Raises ModelError."""
    if config.model.path == FAKE_NAME:
        return None
    return shape_of(open_model(config.model.path, cache_dir).manifest, DTYPE_BYTES[config.model.dtype])


def read_vocab_size(config: Config, cache_dir: Path) -> int:
    """Prompts are made of ids below it. Raises ModelError."""
    if config.model.path == FAKE_NAME:
        return FAKE_VOCAB_SIZE
    return open_model(config.model.path, cache_dir).manifest.vocab_size


def shape_of(manifest: ModelManifest, number_bytes: int) -> ModelShape:
    """The manifest's sizes."""
    return ModelShape(
        num_layers=manifest.num_layers,
        hidden_size=manifest.hidden_size,
        intermediate_size=manifest.intermediate_size,
        num_heads=manifest.num_heads,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        vocab_size=manifest.vocab_size,
        number_bytes=number_bytes,
    )
