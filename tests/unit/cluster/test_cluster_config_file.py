"""One YAML file and the flags that override it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config_file import load_config
from pd_core.config import Config
from pd_core.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "kvrelay.yaml"
    file.write_text(text)
    return file


def test_without_a_file_and_flags_everything_is_default():
    assert load_config(None, {"router.port": None, "model.path": None}) == Config()


def test_the_file_is_read_and_flags_override_it(tmp_path):
    file = write(tmp_path, "router: {port: 9000, max_queue: 7}\nmodel:\n  dtype: float32\n")
    config = load_config(file, {"router.port": 18080, "model.dtype": None})
    assert (config.router.port, config.router.max_queue, config.model.dtype) == (18080, 7, "float32")


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "router:\n"])
def test_an_empty_file_or_section_is_all_defaults(tmp_path, text):
    assert load_config(write(tmp_path, text), {"router.port": 18080}).router.port == 18080


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("decode: {max_bach: 3}", "decode"),
        ("decode: {max_batch: many}", "decode.max_batch"),
        ("router: {port: 70000}", "router.port"),
        ("prefill: {chunk_tokens: 100}", "prefill.chunk_tokens"),
        ("router: 3", "router"),
        ("nonsense: {}", None),
    ],
)
def test_a_wrong_value_is_named_by_its_path_and_its_file(tmp_path, text, param):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_config(file, {})
    assert raised.value.param == param
    assert str(file) in raised.value.message


def test_a_flag_cannot_go_below_a_value_that_is_no_section(tmp_path):
    with pytest.raises(ConfigError, match="router: expected a section, got int") as raised:
        load_config(write(tmp_path, "router: 3"), {"router.port": 1})
    assert raised.value.param == "router"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n- b\n", "a mapping of sections, not a list"),
        ("{", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("!!python/object/apply:os.getpid []", "is not YAML"),
        ("[" * 5000, "is not YAML"),
    ],
)
def test_what_is_no_config_is_refused_in_one_sentence(tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_config(write(tmp_path, text), {})
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("decode: {max_batch: 1}\nrouter: {}\ndecode: {}\n", "decode", (3, 1)),
        ("decode:\n  max_batch: 1\n  'max_batch': 2\n", "max_batch", (3, 2)),
        ("decode: {max_batch: 1, max_batch: 1}", "max_batch", (1, 1)),
    ],
)
def test_a_key_that_is_there_twice_is_refused_with_its_lines(tmp_path, text, key, lines):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_config(file, {})
    assert (
        raised.value.message == f"{file}: {key} is there twice: in line {lines[0]}, and before that in line {lines[1]}"
    )
    assert raised.value.param == key


def test_a_merged_section_may_be_overridden(tmp_path):
    file = write(tmp_path, "decode: &both {num_workers: 2, num_threads: 1}\nprefill: {<<: *both, num_workers: 3}\n")
    config = load_config(file, {})
    assert (config.decode.num_workers, config.prefill.num_workers, config.prefill.num_threads) == (2, 3, 1)


def test_a_file_that_is_not_there_or_too_large_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        load_config(tmp_path / "missing.yaml", {})
    with pytest.raises(ConfigError, match="at most 1 MiB"):
        load_config(write(tmp_path, "#" * (1 << 20) + "\n"), {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, {})


@given(st.binary(max_size=200))
def test_no_bytes_in_the_file_raise_anything_but_config_error(tmp_path_factory, garbage):
    file = tmp_path_factory.mktemp("garbage") / "kvrelay.yaml"
    file.write_bytes(garbage)
    try:
        assert isinstance(load_config(file, {}), Config)
    except ConfigError as error:
        assert str(file) in error.message
