"""The folder in which converted models lie: one entry for each source and converter version.

    models/<key>/            an entry, whole or not there
        manifest.json        written last; names size and digest of every other file
        model.safetensors    Hugging Face names; see below
        tokenizer.json
        chat_template.jinja  when the model has one
    models/.lock-<key>       held (flock) by whoever converts
    models/.tmp-<key>-*      a conversion under way, or the rest of one that was killed

An entry appears by one rename of a folder whose files are on the disk, so a reader needs no lock.

Every tensor is stored in the type in which it was published (F32, F16, BF16), so nothing is lost. A quantised one is
dequantised in float32 and rounded once to bfloat16: that is what an engine which runs in bfloat16 makes of it in any
case, to the bit, at half the size. Run in float32, such a model has the rounded weights (off by up to 2^-9 of each);
the weights digest is that of the stored bytes, so it always names what is really multiplied.
A conversion holds one tensor at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pd_core.errors import ModelError
from pd_model.manifest import ModelManifest, tensor_shapes
from pd_model.safetensors_file import TensorPlan, write_tensors
from pd_model.source import ModelSource
from pd_model.source_digest import file_digest

CONVERTER_VERSION = "2"
"""Part of every key: a change of what a conversion writes needs another one."""

WEIGHTS, TOKENIZER, CHAT_TEMPLATE, MANIFEST = (
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
    "manifest.json",
)
LOCK_POLL_S = 0.1

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is, 0 to 1."""


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of an entry was when it was written. digest: blake2b-128 (hex) of its bytes."""

    num_bytes: int
    mtime_ns: int
    digest: str


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """manifest.json of an entry. seal: digest of this struct with an empty seal."""

    manifest: ModelManifest
    template_tokens: dict[str, str]
    files: dict[str, StoredFile]
    seal: str = ""

    def sealed(self) -> Entry:
        bare = msgspec.json.encode(msgspec.structs.replace(self, seal=""), order="sorted")
        return msgspec.structs.replace(self, seal=hashlib.blake2b(bare, digest_size=16).hexdigest())


def find_entry(folder: Path) -> Entry | None:
    """The entry in `folder`, or None when there is none or any part of it is not as it was written.

    The weights are read only if their time stamp has changed (copied folders): sizes and stamps tell the rest.
    """
    try:
        entry = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Entry)
        whole = entry.sealed() == entry and all(
            _is_as_written(folder / name, stored) for name, stored in entry.files.items()
        )
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None
    return entry if whole and {WEIGHTS, TOKENIZER} <= entry.files.keys() else None


def find_or_convert(
    models: Path, key: str, open_source: Callable[[], ModelSource], progress: Progress, lock_wait_s: float
) -> tuple[Path, Entry]:
    """The entry of `key`, converted now if it is not there. Any number of processes may call this at once.

    Raises ModelError when the source cannot be served, the disk is too small, or another process holds the lock for
    longer than `lock_wait_s`.
    """
    folder = models / key
    try:
        if (entry := find_entry(folder)) is not None:
            return folder, entry
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".lock-{key}", progress, lock_wait_s):
            if (entry := find_entry(folder)) is not None:  # another process converted it while we waited
                return folder, entry
            _sweep(models, key)
            progress("converting the model", 0.0)
            return folder, _convert(models, key, open_source(), progress)
    except OSError as error:
        raise ModelError(f"the cache of converted models in {models} cannot be used: {error}") from error


def _is_as_written(path: Path, stored: StoredFile) -> bool:
    stat = path.stat()
    if stat.st_size != stored.num_bytes:
        return False
    if stat.st_mtime_ns == stored.mtime_ns and path.name == WEIGHTS:
        return True
    if file_digest(path) != stored.digest:
        return False
    # A copy: the right bytes with a new stamp, which is set back so that they are read only once.
    # In a cache that may not be written they are read every time.
    with contextlib.suppress(OSError):
        os.utime(path, ns=(stat.st_atime_ns, stored.mtime_ns))
    return True


@contextlib.contextmanager
def _locked(path: Path, progress: Progress, wait_s: float) -> Iterator[None]:
    """flock is the kernel's: it ends with its process, however that dies."""
    deadline_s = time.monotonic() + wait_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise ModelError(
                        f"another process has been converting this model for {wait_s:.0f} s (it holds {path})"
                    ) from None
            progress("waiting for another process to convert the model", 0.0)
            time.sleep(LOCK_POLL_S)
        yield


def _sweep(models: Path, key: str) -> None:
    """Removes what killed conversions left, and an entry that is not whole. Only under the lock of `key`."""
    for leftover in [*models.glob(f".tmp-{key}-*"), models / key]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def _convert(models: Path, key: str, source: ModelSource, progress: Progress) -> Entry:
    source.check_tensors()
    plans = {
        name: TensorPlan(source.stored_type(name), shape) for name, shape in tensor_shapes(source.manifest).items()
    }
    _check_room(models, sum(plan.num_bytes for plan in plans.values()))
    temporary = Path(tempfile.mkdtemp(dir=models, prefix=f".tmp-{key}-"))
    try:
        files = {TOKENIZER: _write_text(temporary / TOKENIZER, source.tokenizer_json)}
        if source.chat_template is not None:
            files[CHAT_TEMPLATE] = _write_text(temporary / CHAT_TEMPLATE, source.chat_template)
        digest = write_tensors(
            temporary / WEIGHTS,
            plans,
            source.read,
            lambda done, total: progress("converting the model", done / total),
        )
        files[WEIGHTS] = _stored(temporary / WEIGHTS, digest)
        entry = Entry(source.manifest, source.template_tokens, files).sealed()
        _write_text(temporary / MANIFEST, msgspec.json.format(msgspec.json.encode(entry)).decode())
        _sync_folder(temporary)
        temporary.rename(models / key)
        _sync_folder(models)
    except BaseException:  # Ctrl-C too leaves nothing behind
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return entry


def _check_room(models: Path, weights_bytes: int) -> None:
    free_bytes = shutil.disk_usage(models).free
    if weights_bytes > free_bytes:
        raise ModelError(
            f"converting the model takes {weights_bytes / 2**30:.1f} GiB in {models}; "
            f"{free_bytes / 2**30:.1f} GiB are free"
        )


def _write_text(path: Path, text: str) -> StoredFile:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return _stored(path, file_digest(path))


def _stored(path: Path, digest: str) -> StoredFile:
    stat = path.stat()
    return StoredFile(stat.st_size, stat.st_mtime_ns, digest)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
