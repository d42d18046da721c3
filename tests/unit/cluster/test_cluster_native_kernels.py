"""Kernels are built before the workers start, or it is said why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import native_kernels
from cluster.native_kernels import prepare_kernels
from pd_core.config import parse_config
from pd_engine.native.build import NativeUnavailable


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> None:
        raise NativeUnavailable("there is no compiler")

    monkeypatch.setattr(native_kernels, "find_compiler", find)


@pytest.mark.parametrize("model", [{"path": "fake"}, {"kernels": "sdpa"}, {"kernels": "tiled"}])
def test_nothing_is_built_for_a_model_that_does_not_use_them(
    model: dict[str, str], tmp_path: Path, no_compiler: None
) -> None:
    said: list[str] = []
    prepare_kernels(parse_config({"model": model}), tmp_path, said.append)
    assert said == []


def test_without_a_compiler_torch_is_used_and_that_is_said(tmp_path: Path, no_compiler: None) -> None:
    said: list[str] = []
    prepare_kernels(parse_config({}), tmp_path, said.append)
    assert said == ["no native kernels, torch's are used: there is no compiler"]


def test_who_asks_for_native_kernels_alone_does_not_get_others(tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(NativeUnavailable, match="no compiler"):
        prepare_kernels(parse_config({"model": {"kernels": "native"}}), tmp_path, lambda _: None)
