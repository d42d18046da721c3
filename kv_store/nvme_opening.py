"""Opens the tier's folder, whatever lies in it. Runs in a disk thread."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from kv_store.nvme_files import DiskFiles
from kv_store.nvme_folder import StoreFolder, set_name
from kv_store.nvme_index import Rebuilt, SlotIndex
from kv_store.nvme_room import EvictSet, Quarters, over_quota
from kv_store.nvme_set import HEADERS, SlotFiles, make_set
from kv_store.slot_format import SetPage, unpack_headers
from pd_core.errors import Unavailable

_log = logging.getLogger(__name__)


class Opened(msgspec.Struct, frozen=True):
    """A folder in use. num_evicted_sets: others' sets that the quota had no room for; is_new: our set was not there,
    or not usable."""

    folder: StoreFolder
    disk: SlotFiles
    rebuilt: Rebuilt
    quarters: Quarters
    device: int
    num_evicted_sets: int
    is_new: bool

    def close(self) -> None:
        """Raises OSError."""
        self.disk.close()
        self.folder.close()


def open_folder(files: DiskFiles, path: Path, page: SetPage, quota_bytes: int, device: int | None) -> Opened:
    """Locks the folder, sweeps it, brings it within the quota, and makes the index of our set.

    device: of the disk on which the folder was before, when it was open before: a folder that turns up on another one
    is what lies below a disk that went, and is left alone. Raises Unavailable for that and for a folder that another
    process has; OSError.
    """
    found_device = files.device(path)
    if device is not None and found_device != device:
        raise Unavailable(f"{path} is on another file system than before: its disk is not there")
    folder = StoreFolder(files, path)
    try:
        for name in folder.sweep():
            _log.warning("%s: %s was never finished and is removed", path, name)
        disk, is_new = _open_set(files, folder, path / set_name(page), page)
        try:
            files.touch(path / set_name(page) / HEADERS)  # used now: others' quotas let it go later
            return _take_stock(folder, disk, page, quota_bytes, found_device, is_new)
        except BaseException:
            disk.close()
            raise
    except BaseException:
        folder.close()
        raise


def _open_set(files: DiskFiles, folder: StoreFolder, path: Path, page: SetPage) -> tuple[SlotFiles, bool]:
    """Our set, made anew where there is none or where what there is cannot be ours."""
    try:
        disk = SlotFiles(files, path, page)
    except (FileNotFoundError, NotADirectoryError):
        pass
    else:
        if disk.has_our_page():
            return disk, False
        disk.close()
    if files.exists(path):
        _log.warning("%s is damaged beyond use and is made anew", path)
        folder.remove_set(path.name)
    make_set(files, path, page)
    return SlotFiles(files, path, page), True


def _take_stock(
    folder: StoreFolder, disk: SlotFiles, page: SetPage, quota_bytes: int, device: int, is_new: bool
) -> Opened:
    quarters = folder.look_around(set_name(page))
    num_slots = disk.fit()
    num_evicted_sets = 0
    while (step := over_quota(num_slots, page.slot_bytes, quota_bytes, quarters)) is not None:
        if isinstance(step, EvictSet):
            folder.remove_set(step.name)
            quarters = quarters.without(step.name)
            num_evicted_sets += 1
        else:
            num_slots = disk.fit(step.num_slots)
    headers = disk.read_headers(num_slots)
    rebuilt = SlotIndex.rebuild(num_slots, unpack_headers(headers, page))
    return Opened(folder, disk, rebuilt, quarters, device, num_evicted_sets, is_new)
