"""ucxx, imported where it is used and nowhere else: it is an extra, and takes half a second."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kv_transport.ucx_offer import HOW_TO_INSTALL
from pd_core.errors import ConfigError

PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
"""Set to "true" it makes ucxx load the system's UCX, the only one that can have RDMA; see docs/adr/0004."""
_QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "FATAL"}
"""UCX speaks to stdout, of peers that are gone, which we log ourselves, and of what ucxx itself put there."""


_CANCEL = "_ZN4ucxx10RequestTag6cancelEv"
_NUM_CANCELING = "_ZNK4ucxx8Endpoint16getCancelingSizeEv"
"""Methods of ucxx's C++ classes, public there, that its Python side does not have."""


class Request(Protocol):
    """One send or receive that UCX works on."""

    @property
    def ucxx_ptr(self) -> int: ...

    @property
    def completed(self) -> bool:
        """Whether UCX will not touch its memory any more, whatever came of it."""
        ...

    def check_error(self) -> None:
        """Raises UcxLibrary.error unless it has gone well, or still goes on."""
        ...


class UcxLibrary:
    """The parts of ucxx that we use."""

    def __init__(self) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        api: Any = importlib.import_module("ucxx._lib.libucxx")
        self.array: Any = importlib.import_module("ucxx._lib.arr").Array
        self.version: str = ".".join(str(part) for part in importlib.import_module("ucxx").get_ucx_version())
        self.error: type[Exception] = api.UCXError
        self.tag: Any = api.UCXXTag
        self._api = api
        methods = importlib.import_module("libucxx").load_library()
        self._cancel: Any = getattr(methods, _CANCEL)
        self._num_canceling: Any = getattr(methods, _NUM_CANCELING)
        for method in (self._cancel, self._num_canceling):
            method.argtypes = [ctypes.c_void_p]
        self._num_canceling.restype = ctypes.c_size_t

    def make_worker(self, settings: Mapping[str, str]) -> tuple[Any, Any]:
        """A context with a worker of its own, in blocking mode. Raises UcxLibrary.error."""
        features = (self._api.Feature.TAG, self._api.Feature.WAKEUP)
        context = self._api.UCXContext(dict(settings), features)
        worker = self._api.UCXWorker(context)
        worker.init_blocking_progress_mode()
        return context, worker

    def make_endpoint(self, worker: Any, address: bytes) -> Any:
        """To the peer with that address, noticing its end. Raises UcxLibrary.error."""
        theirs = self._api.UCXAddress.create_from_buffer(bytearray(address))
        return worker.create_endpoint_from_worker_address(theirs, True)

    def cancel(self, request: Request) -> None:
        """A receive that nothing has come for is complete then; to any other nothing happens."""
        self._cancel(request.ucxx_ptr)

    def forget_cancelled(self, endpoint: Any) -> None:
        """Lets go of requests of a closed endpoint, which are complete. They hold it, and ucxx holds them until it is
        asked how many there are."""
        self._num_canceling(endpoint.ucxx_ptr)


def is_installed() -> bool:
    """Whether ucxx can be found; not whether it works."""
    return importlib.util.find_spec("ucxx") is not None


def load_ucx() -> UcxLibrary:
    """Raises ConfigError saying what is missing."""
    try:
        return UcxLibrary()
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"ucxx cannot be loaded ({error}): {HOW_TO_INSTALL}", param="transfer.path") from error


def where_loaded_from(maps: str) -> str:
    """Path of the UCX that is in this process, from the text of /proc/self/maps; empty when there is none."""
    found = re.search(r"(/\S*/libucp\.so\S*)", maps)
    return found[1] if found else ""


def loaded_from() -> str:
    """The same, of this process now."""
    return where_loaded_from(Path("/proc/self/maps").read_text())
