"""Reads a model from a Hugging Face folder: config.json, safetensors (one file or shards), tokenizer.json.

Which settings are served stands in `pd_model.hf_settings`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pd_core.errors import ModelError
from pd_model.hf_settings import Family, find_biases, find_family, find_refusal
from pd_model.manifest import ModelManifest, check_manifest, tensor_shapes
from pd_model.rope import rope_from_config, served_context
from pd_model.safetensors_file import TensorEntry, read_header, read_tensor, stored_type
from pd_model.source import name_some
from pd_model.stored_type import Stored, StoredType
from pd_model.text_encoder import read_json
from pd_model.token_form import form_of

T = TypeVar("T")

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class _Tensor(msgspec.Struct, frozen=True):
    path: Path
    entry: TensorEntry
    data_start: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights. Raises ModelError when there are none or shards are missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        names = {str(name) for name in weight_map.values()}
        if strange := {name for name in names if Path(name).name != name}:
            raise ModelError(f"{index} names files outside its folder: {name_some(strange)}")
        paths = [folder / name for name in sorted(names)]
    else:
        paths = [folder / "model.safetensors"]
    if missing := {path.name for path in paths if not path.is_file()}:
        raise ModelError(f"{folder} lacks {name_some(missing)}; only safetensors weights are supported")
    return paths


def source_files(folder: Path) -> list[Path]:
    """Every file that a conversion reads. Raises ModelError when the folder holds no model."""
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ModelError(f"{folder} is not a Hugging Face model folder: it lacks {needed}")
    return [*(path for name in TEXT_FILES if (path := folder / name).is_file()), *weight_files(folder)]


class HfSource:
    """A folder with a model of the FAMILIES. Raises ModelError for any other, and for settings that are refused."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config_path = folder / "config.json"
        self._config = _read_json(self._config_path)
        self._generation = _read_json_if_there(folder / "generation_config.json")
        self._tokenizer_config = _read_json_if_there(folder / "tokenizer_config.json")
        self._manifest = self._read_manifest()
        self._tensors: dict[str, _Tensor] = {}
        for path in weight_files(folder):
            entries, data_start = read_header(path)
            self._tensors |= {name: _Tensor(path, entry, data_start) for name, entry in entries.items()}

    @property
    def manifest(self) -> ModelManifest:
        return self._manifest

    @cached_property
    def tokenizer_json(self) -> str:
        path = self._folder / "tokenizer.json"
        try:
            text = path.read_text("utf-8")
            form_of(read_json(text))  # a kind that is not served is refused now, not when the gateway starts
        except (ModelError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: {error}") from error
        return text

    @cached_property
    def chat_template(self) -> str | None:
        own_file = self._folder / "chat_template.jinja"
        if own_file.is_file():
            try:
                return own_file.read_text("utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"{own_file} is no UTF-8: {error}") from error
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several by name: the one for plain chats is called "default"
            plain = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = plain[0].get("template") if plain else None
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{self._folder}/tokenizer_config.json has a chat_template that is no text")
        return template

    @property
    def template_tokens(self) -> dict[str, str]:
        found = {}
        for variable in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = self._tokenizer_config.get(variable)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[variable] = text
        return found

    def check_tensors(self) -> None:
        needed = tensor_shapes(self._manifest).keys()
        # Old checkpoints carry the rotary frequencies, which follow from rope_theta.
        # Some store a tied head although it is the embedding.
        idle = {name for name in self._tensors if name.endswith(".rotary_emb.inv_freq")}
        if self._manifest.tied_embeddings:
            idle.add("lm_head.weight")
        if missing := needed - self._tensors.keys():
            raise ModelError(f"{self._folder} lacks tensors: {name_some(missing)}")
        if unknown := self._tensors.keys() - needed - idle:
            raise ModelError(f"{self._folder} has tensors that this model does not use: {name_some(unknown)}")

    def stored_type(self, name: str) -> StoredType:
        tensor = self._tensors[name]
        return stored_type(tensor.path, name, tensor.entry)

    def read(self, name: str) -> Stored:
        tensor = self._tensors[name]
        return read_tensor(tensor.path, name, tensor.entry, tensor.data_start)

    def _setting(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self._config.get(key)
        value = default if value is None else value
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ModelError(f"{self._config_path} has {value!r} for {key}; {kind.__name__} is needed")
        return value

    def _read_manifest(self) -> ModelManifest:
        family = find_family(self._config)
        if not isinstance(family, Family):
            raise ModelError(f"{self._config_path} has {family}")
        trained_tokens = self._setting("max_position_embeddings", int)
        rope = rope_from_config(self._config, trained_tokens, self._config_path)
        context_tokens = served_context(trained_tokens, rope.scaling)
        if refusal := find_refusal(self._config, family, context_tokens):
            raise ModelError(f"{self._config_path} has {refusal}")
        hidden_size = self._setting("hidden_size", int)
        num_heads = self._setting("num_attention_heads", int)
        manifest = ModelManifest(
            architecture=self._setting("model_type", str),
            num_layers=self._setting("num_hidden_layers", int),
            hidden_size=hidden_size,
            intermediate_size=self._setting("intermediate_size", int),
            num_heads=num_heads,
            num_kv_heads=self._setting("num_key_value_heads", int, num_heads),
            head_dim=self._setting("head_dim", int, family.head_dim or hidden_size // max(num_heads, 1)),
            vocab_size=self._setting("vocab_size", int),
            context_tokens=context_tokens,
            rms_norm_eps=self._setting("rms_norm_eps", float),
            rope_theta=rope.theta,
            tied_embeddings=self._setting("tie_word_embeddings", bool, False),
            eos_token_ids=self._eos_token_ids(),
            bos_token_id=self._config.get("bos_token_id"),
            qk_norm=family.qk_norm,
            biases=find_biases(self._config, family),
            rope_scaling=rope.scaling,
        )
        check_manifest(manifest)
        return manifest

    def _eos_token_ids(self) -> list[int]:
        ends = self._generation.get("eos_token_id", self._config.get("eos_token_id"))
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(end, int) for end in listed):
            raise ModelError(f"{self._folder} has eos_token_id {ends!r}, which is no token id")
        return sorted(set(listed))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}
