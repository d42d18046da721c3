"""What the identity tests share: the embedded model, converted once into the user's cache."""

from __future__ import annotations

import pytest
from conversations import References

from pd_model.folder import ModelFolder, default_cache_dir, open_model


@pytest.fixture(scope="session")
def model_folder() -> ModelFolder:
    """The embedded model."""
    return open_model(None, default_cache_dir())


@pytest.fixture(scope="session")
def references(model_folder: ModelFolder) -> References:
    """What one process alone makes of requests to the embedded model."""
    return References(model_folder)
