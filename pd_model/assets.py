"""Opens what the gateway needs of a model."""

from __future__ import annotations

from pathlib import Path

from pd_model.chat import ChatTemplate
from pd_model.fake import FAKE_NAME, fake_model
from pd_model.folder import ModelFolder, open_model
from pd_model.model_assets import ModelAssets
from pd_model.tokenizer import load_tokenizer

__all__ = ["ModelAssets", "assets_of", "load_assets"]


def load_assets(path: str | None, cache_dir: Path) -> ModelAssets:
    """Assets of the model at `path`; None is the embedded model, "fake" the one for tests. Raises ModelError."""
    return fake_model() if path == FAKE_NAME else assets_of(open_model(path, cache_dir))


def assets_of(folder: ModelFolder) -> ModelAssets:
    """Assets of a model that is open. Raises ModelError when its tokenizer or chat template cannot be used."""
    tokenizer = load_tokenizer(folder)
    return ModelAssets(
        name=folder.name,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(folder.chat_template, tokenizer.special_texts, folder.template_tokens),
        eos_token_ids=list(folder.manifest.eos_token_ids),
        context_tokens=folder.manifest.context_tokens,
        vocab_size=folder.manifest.vocab_size,
    )
