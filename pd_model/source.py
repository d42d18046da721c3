"""What a conversion asks of the place where a model comes from: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from pd_model.manifest import ModelManifest
from pd_model.stored_type import Stored, StoredType


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

    def stored_type(self, name: str) -> StoredType:
        """The type of the numbers that `read` gives."""
        ...

    def read(self, name: str) -> Stored:
        """The tensor that Hugging Face calls `name`. Only one is asked for at a time: none is kept."""
        ...


def name_some(names: Collection[str]) -> str:
    """A few of many names for an error's sentence."""
    first = sorted(names)[:3]
    rest = len(names) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")
