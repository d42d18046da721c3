from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from pd_core.layout import DType
from pd_engine.native.build import build
from pd_engine.native.library import Library


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(build(Path(platformdirs.user_cache_dir("kvrelay"))))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`variant` and `dtype` run over everything that this processor can run."""
    if {"variant", "dtype"} <= set(metafunc.fixturenames):
        found = Library(build(Path(platformdirs.user_cache_dir("kvrelay"))))
        dtypes: tuple[DType, ...] = ("float32", "bfloat16")
        pairs = [(variant, dtype) for dtype in dtypes for variant in found.variants(dtype)]
        metafunc.parametrize(("variant", "dtype"), pairs, ids=[f"{variant}-{dtype}" for variant, dtype in pairs])
