"""The tensors of a safetensors file by name, each read (memory-mapped) when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd_core.errors import ModelError


class TensorFile(Mapping[str, Tensor]):
    """Raises ModelError when the file cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                self._names = list(file.keys())
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the weights at {path}: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
