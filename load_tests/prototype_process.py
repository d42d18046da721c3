"""The program of a process that runs the kernel prototype: `python -m load_tests.prototype_process CORES FOLDER`.

The prototype is a few files of throw-away code outside this package. They are copied, because it builds beside itself,
and it is asked the same questions as an engine process. It needs a compiler and ninja.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from load_tests.engine_messages import Answer, Load, Loaded, Question, Refused, TimeDecode, TimePrefill, Took
from load_tests.engine_process import serve
from load_tests.model_facts import read_shape
from pd_core.errors import EngineError, KvrelayError
from pd_core.layout import BLOCK_TOKENS
from pd_model.folder import open_model

FILES = ("kern.py", "kern.cpp", "proto_hand.py")
NUM_BLOCKS = 1300
PROMPT_BLOCKS = 256
STREAM_BLOCKS = 64
MODEL_NAMES = {"bfloat16": "smol-hf-bf16", "float32": "smol-hf"}
"""Folders in which it looks for the model."""


class PrototypeAnswers:
    """The prototype, from its `Load` on. folder: where its files are"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engine: Any = None
        self._vocab_size = 0

    def to(self, question: Question) -> Answer:
        try:
            return self._answer(question)
        except (KvrelayError, OSError, RuntimeError, ImportError) as error:
            return Refused(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Nothing is left but this process, and it is about to end."""

    def _answer(self, question: Question) -> Answer:
        match question:
            case Load():
                return self._load(question)
            case TimePrefill():
                return Took([self._time_prefill(question)])
            case TimeDecode():
                return Took(self._time_decode(question))
        raise EngineError(f"the prototype is not asked for {type(question).__name__}")

    def _load(self, load: Load) -> Loaded:
        import torch  # noqa: PLC0415 - after the cores are settled

        cache_dir = Path(load.cache_dir)
        shape = read_shape(load.config, cache_dir)
        if shape is None or shape.head_dim != 64:
            raise EngineError("the prototype runs heads of 64 alone")
        here = _copy_files(self._folder, cache_dir / "prototype")
        os.environ["MODELS"] = str(_write_model(load, cache_dir, here))  # the prototype's own settings
        os.environ["THP"] = os.environ["THPW"] = "1"
        sys.path.insert(0, str(here))
        torch.set_num_threads(load.num_threads)
        torch.set_grad_enabled(False)
        import kern  # type: ignore[import-not-found]  # noqa: PLC0415 - the prototype

        self._engine = kern.Eng(getattr(torch, load.config.model.dtype), "own", nblocks=NUM_BLOCKS)
        self._vocab_size = shape.vocab_size
        return Loaded(shape, shape.vocab_size, 0, {"engine": "prototype"})

    def _time_prefill(self, question: TimePrefill) -> float:
        import torch  # noqa: PLC0415 - as above

        tokens = self._draw(random.Random(question.seed), question.num_tokens)
        table = torch.arange(-(-question.num_tokens // BLOCK_TOKENS), dtype=torch.int32)
        began_s = time.perf_counter()
        self._engine.prefill(tokens, table, question.chunk_tokens)[0].argmax()
        return time.perf_counter() - began_s

    def _time_decode(self, question: TimeDecode) -> list[float]:
        """Its pool is all zeros in pages of its own, which takes as long to read as KV."""
        import torch  # noqa: PLC0415 - as above

        num_streams = len(question.starts)
        if PROMPT_BLOCKS + num_streams * STREAM_BLOCKS > NUM_BLOCKS:
            raise EngineError(f"the prototype's pool has no room for {num_streams} streams")
        tables = torch.arange(PROMPT_BLOCKS, PROMPT_BLOCKS + num_streams * STREAM_BLOCKS, dtype=torch.int32)
        tables = tables.view(num_streams, STREAM_BLOCKS)
        rows, bounds = torch.arange(num_streams), torch.arange(num_streams + 1, dtype=torch.int32)
        tokens = self._draw(random.Random(0), num_streams)
        took_s = []
        for step in range(question.num_steps):
            positions = torch.tensor(question.starts, dtype=torch.int32) + step
            began_s = time.perf_counter()
            tokens = self._engine.fwd(tokens, positions, tables, bounds, rows).argmax(-1)
            took_s.append(time.perf_counter() - began_s)
        return took_s

    def _draw(self, generator: random.Random, num_tokens: int) -> Any:
        import torch  # noqa: PLC0415 - as above

        return torch.tensor([generator.randrange(self._vocab_size) for _ in range(num_tokens)])


def _copy_files(folder: Path, into: Path) -> Path:
    """A folder named by what is in it, so that a build is used again as long as it fits.

    Raises EngineError when one of the files is missing.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise EngineError(f"the prototype in {folder} lacks {', '.join(missing)}")
    texts = {name: (folder / name).read_bytes() for name in FILES}
    here = into / hashlib.blake2b(b"\0".join(texts.values()), digest_size=8).hexdigest()
    (here / "build").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if not (here / name).is_file() or (here / name).read_bytes() != text:  # a newer file is built again
            (here / name).write_bytes(text)
    return here


def _write_model(load: Load, cache_dir: Path, here: Path) -> Path:
    """The model as the prototype reads it: Hugging Face's names, beside a config that has only what it asks for."""
    model = open_model(load.config.model.path, cache_dir)
    manifest = model.manifest
    folder = here / "models" / MODEL_NAMES[load.config.model.dtype]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "num_hidden_layers": manifest.num_layers,
        "num_attention_heads": manifest.num_heads,
        "num_key_value_heads": manifest.num_kv_heads,
        "hidden_size": manifest.hidden_size,
        "intermediate_size": manifest.intermediate_size,
        "head_dim": manifest.head_dim,
        "rms_norm_eps": manifest.rms_norm_eps,
        "rope_theta": manifest.rope_theta,
        "vocab_size": manifest.vocab_size,
        "max_position_embeddings": manifest.context_tokens,
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    weights = folder / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(model.weights_path)
    return here / "models"


if __name__ == "__main__":
    serve(lambda: PrototypeAnswers(Path(sys.argv[2])))
