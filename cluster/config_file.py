"""One YAML file, and the flags that override it, as a typed config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pd_core.config import Config, parse_config
from pd_core.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


def load_config(file: Path | None, overrides: Mapping[str, object]) -> Config:
    """The config of `file` (None: all defaults) with `overrides` put over it.

    overrides: by path, like {"router.port": 18080}; a value of None leaves what the file says
    Raises ConfigError: the file cannot be read, or the path in `param` is unknown or has a wrong value.
    """
    tree = {} if file is None else _read_tree(file)
    for path, value in overrides.items():
        if value is not None:
            _put(tree, path, value)
    try:
        return parse_config(tree)
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(f"{file}: {error.message}", param=error.param) from error


def _read_tree(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: a config is at most {MAX_FILE_BYTES >> 20} MiB")
        tree = _load(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except (UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        sentence = " ".join(str(error).split())
        raise ConfigError(f"{file} is not YAML: {sentence}") from error
    if tree is None:  # an empty file is an empty config
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a config is a mapping of sections, not a {type(tree).__name__}")
    return tree


class _Loader(yaml.SafeLoader):
    """YAML forbids a key that is there twice; its Python library lets the last one win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                where = f"line {line}, and before that in line {seen[key.value]}"
                raise ConfigError(f"{self.name}: {key.value} is there twice: in {where}", param=key.value)
            seen[key.value] = line
        return node


def _load(file: Path) -> Any:
    loader = _Loader(file.read_text("utf-8"))
    loader.name = str(file)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, field = path.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if below is None:  # `router:` with nothing under it
            below = tree[section] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"{section}: expected a section, got {type(below).__name__}", param=section)
        tree = below
    tree[field] = value
