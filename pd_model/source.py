"""What a conversion asks of the place where a model comes from: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pd_model.manifest import ModelManifest


class ModelSource(Protocol):
    """A model as its author published it. Every member raises ModelError for what is not supported or is broken."""

    @property
    def manifest(self) -> ModelManifest: ...

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer in the format of the `tokenizers` library."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source; None when the model has none."""
        ...

    @property
    def template_tokens(self) -> dict[str, str]:
        """The variables of a chat template that name special tokens: `bos_token` and the like."""
        ...

    def check_tensors(self) -> None:
        """Nothing that the model needs is missing and nothing is there that would be left out."""
        ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor that Hugging Face calls `name`."""
        ...


def name_some(names: set[str]) -> str:
    """A few of many names for an error's sentence."""
    first = sorted(names)[:3]
    rest = len(names) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")
