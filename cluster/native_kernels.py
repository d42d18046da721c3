"""Builds the native kernels before any worker starts, so that no two of them do it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pd_core.config import Config
from pd_engine.native.build import NativeUnavailable, build, find_compiler, library_path
from pd_model.fake import FAKE_NAME


def prepare_kernels(config: Config, cache_dir: Path, on_progress: Callable[[str], None]) -> None:
    """Nothing to do for the fake model, on a GPU, for torch's kernels, or when the library is there already.

    Where it cannot be had, workers use torch's kernels and /ready says why.
    Raises NativeUnavailable when the config asks for the native kernels and for no others.
    """
    model = config.model
    if model.path == FAKE_NAME or model.device != "cpu" or model.kernels not in ("auto", "native"):
        return
    try:
        if not library_path(cache_dir, find_compiler()).exists():
            on_progress("compiling the native kernels (once; half a minute or so)")
        build(cache_dir)
    except NativeUnavailable as error:
        if config.model.kernels == "native":
            raise
        on_progress(f"no native kernels, torch's are used: {error.message}")
