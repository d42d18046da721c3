from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pd_core.errors import ModelError
from pd_model import source_digest
from pd_model.source_digest import content_digest, file_digest, files_digest


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was last changed an hour ago, as far as the clock says."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"abc")
    later_s = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later_s)
    return path


def test_a_settled_file_is_read_once(old_file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = content_digest(old_file, memory)
    assert digest == file_digest(old_file)
    monkeypatch.setattr(source_digest, "file_digest", lambda _path: pytest.fail("the file was read again"))
    assert content_digest(old_file, memory) == digest


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path: Path, memory: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"abc")
    content_digest(path, memory)
    assert not memory.exists()


def test_a_change_is_seen_although_size_and_modification_time_are_put_back(old_file: Path, memory: Path) -> None:
    before = content_digest(old_file, memory)
    stamp = old_file.stat()
    old_file.write_bytes(b"abd")
    os.utime(old_file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert content_digest(old_file, memory) != before


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"stamp": "x", "digest": 1}'])
def test_a_damaged_memory_is_not_believed(old_file: Path, memory: Path, damaged: bytes) -> None:
    digest = content_digest(old_file, memory)
    [slot] = memory.iterdir()
    slot.write_bytes(damaged)
    assert content_digest(old_file, memory) == digest


def test_a_memory_that_cannot_be_written_costs_time_and_nothing_else(old_file: Path, memory: Path) -> None:
    memory.write_text("a file where the folder should be")
    assert content_digest(old_file, memory) == file_digest(old_file)
    assert memory.is_file()


def test_a_file_that_changes_while_it_is_read_is_an_error(
    old_file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append_while_reading(path: Path) -> str:
        path.write_bytes(b"abcd")
        return "digest of neither"

    monkeypatch.setattr(source_digest, "file_digest", append_while_reading)
    with pytest.raises(ModelError, match="changed while it was read"):
        content_digest(old_file, memory)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path, memory: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        content_digest(tmp_path / "missing", memory)


def test_names_contents_and_salt_all_count(tmp_path: Path, memory: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"same")
    two.write_bytes(b"same")
    digests = {files_digest([one], memory, "1"), files_digest([two], memory, "1"), files_digest([one], memory, "2")}
    assert len(digests) == 3
