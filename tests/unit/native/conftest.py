from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pd_core.layout import DType
from pd_engine.native.build import build
from pd_engine.native.library import Library
from pd_model.folder import default_cache_dir


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(build(default_cache_dir()))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The references are too small to be shared out: torch's threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`variant` and `dtype` run over everything that this processor can run."""
    if {"variant", "dtype"} <= set(metafunc.fixturenames):
        found = Library(build(default_cache_dir()))
        dtypes: tuple[DType, ...] = ("float32", "bfloat16")
        pairs = [(variant, dtype) for dtype in dtypes for variant in found.variants(dtype)]
        metafunc.parametrize(("variant", "dtype"), pairs, ids=[f"{variant}-{dtype}" for variant, dtype in pairs])
