"""A model that is broken deep in its files is named by the setting that brought it in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.model_size import measure_model, with_setting
from pd_core.config import parse_config
from pd_core.errors import ModelError


def test_a_folder_whose_files_are_broken_is_named_by_its_setting(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "no such family"}))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError) as raised:
        measure_model(parse_config({"model": {"path": str(tmp_path)}}), tmp_path / "cache", lambda _doing, _share: None)
    assert raised.value.param == "model.path"
    assert raised.value.message.startswith(f"--model / model.path {tmp_path}: ")


def test_what_is_wrong_with_the_default_model_is_nobodys_setting() -> None:
    error = ModelError("the package is torn")
    assert with_setting(error, parse_config({})) is error
    named = with_setting(error, parse_config({"model": {"path": "x.gguf"}}))
    assert (named.message, named.param) == ("--model / model.path x.gguf: the package is torn", "model.path")
    assert with_setting(named, parse_config({"model": {"path": "x.gguf"}})) is named
