from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import Weights, make_weights, write_gguf, write_hf_folder

from pd_model.assets import ModelAssets, load_assets
from pd_model.folder import default_cache_dir


@pytest.fixture
def weights() -> Weights:
    return make_weights()


@pytest.fixture
def tiny_gguf(tmp_path: Path, weights: Weights) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", weights)


@pytest.fixture
def tiny_hf(tmp_path: Path, weights: Weights) -> Path:
    return write_hf_folder(tmp_path / "tiny-hf", weights)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def embedded() -> ModelAssets:
    """The real model's tokenizer, from the user's cache: it is converted at most once on a machine."""
    return load_assets(None, default_cache_dir())
