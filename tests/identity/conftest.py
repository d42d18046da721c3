"""What the identity tests share: the embedded model, converted once into the user's cache."""

from __future__ import annotations

import pytest

from pd_model.folder import ModelFolder, default_cache_dir, open_model


@pytest.fixture(scope="session")
def model_folder() -> ModelFolder:
    """The embedded model."""
    return open_model(None, default_cache_dir())
