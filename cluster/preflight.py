"""Start-up checks: whatever would break later is found here, at once, with a sentence that says what to do."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.machine import count_gpus
from cluster.sizes import check_gpus
from pd_core.config import Config, check_advertised
from pd_core.errors import ConfigError, ModelError
from pd_model.fake import FAKE_NAME
from pd_model.folder import embedded_gguf
from pd_model.hf_source import source_files
from pd_rpc.tls import load_tls

FIRST_PARTY = (
    "cluster",
    "decode_worker",
    "kv_store",
    "kv_transport",
    "load_tests",
    "pd_core",
    "pd_engine",
    "pd_model",
    "pd_rpc",
    "pd_worker",
    "prefill_worker",
    "router",
)
GGUF_MAGIC = b"GGUF"
MIN_PYTHON = (3, 11)
MIN_FREE_DISK_BYTES = 256 << 20


def check_all(config: Config, state_dir: Path) -> None:
    """Raises ConfigError or ModelError with the first thing that is wrong. Fast: nothing is started or waited for."""
    check_platform(sys.version_info[:2], sys.platform)
    check_packages(FIRST_PARTY, Path(__file__).resolve().parent.parent)
    check_port(config.router.host, config.router.port)
    check_advertised(check_host(config.transfer.host, "transfer.host"), "transfer.host")
    load_tls(config.tls)
    check_disk(state_dir)
    if config.model.device == "cuda":
        check_gpus(config, count_gpus())
    check_model(config.model.path)


def check_platform(version: tuple[int, int], platform: str) -> None:
    """Raises ConfigError unless Python and operating system will do."""
    if version < MIN_PYTHON:
        have, need = ".".join(map(str, version)), ".".join(map(str, MIN_PYTHON))
        raise ConfigError(f"kvrelay needs Python {need} or newer; this is {have}")
    if platform != "linux":
        raise ConfigError(f"kvrelay needs Linux (it ends processes through pidfds); this is {platform}")


def check_packages(names: Sequence[str], parent: Path) -> None:
    """Raises ConfigError unless every package lies in `parent`.

    The names `cluster` and `router` exist on PyPI too: an installed namesake would take the place of ours.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        found = [Path(place).resolve() for place in (spec.submodule_search_locations or [])] if spec else []
        places = [place for place in found if place.is_dir()]  # an editable install adds a marker that is no folder
        if places != [parent / name]:
            where = ", ".join(map(str, places)) or "missing"
            raise ConfigError(
                f"package {name} is {where} instead of {parent / name}; a namesake is installed, or the installation "
                f"is broken: make a fresh virtual environment and install kvrelay alone"
            )


def check_port(host: str, port: int) -> None:
    """Raises ConfigError, naming host and port, unless the port can be listened on. Port 0 means any."""
    check_host(host, "router.host")
    try:
        _listen_once(host, port)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"router.port: port {port} on {host} cannot be used: {why}. Choose another with --port",
            param="router.port",
        ) from error


def check_host(host: str, param: str) -> str:
    """The address that it stands for. Raises ConfigError, naming the setting, unless some port of it can be listened
    on."""
    if not host:
        raise ConfigError(f"{param} is empty; it must be an address of this machine, like 127.0.0.1", param=param)
    try:
        return _listen_once(host, 0)
    except (OSError, ValueError) as error:  # ValueError: what cannot be a name at all
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{param} {host!r} is no address of this machine: {why}", param=param) from error


def _listen_once(host: str, port: int) -> str:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = found[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will: a closed one may linger
        probe.bind(address)
        probe.listen(1)
    return str(address[0])


def check_model(path: str | None) -> None:
    """Raises ModelError, naming the setting and the place, when what is there cannot be a model at all."""
    if path is None:
        embedded_gguf()
        return
    if path == FAKE_NAME:
        return
    try:
        _check_looks_like_model(path)
    except (ModelError, OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise ModelError(f"--model / model.path: {error}", param="model.path") from error


def _check_looks_like_model(path: str) -> None:
    if not path:
        raise ModelError("the path is empty; leave it out for the default model")
    where = Path(path).expanduser()
    if where.is_dir():
        source_files(where)
        return
    if where.suffix != ".gguf" or not where.is_file():
        raise ModelError(f"there is no model at {where}: neither a .gguf file nor a Hugging Face folder")
    with where.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelError(f"{where} is not a GGUF file: it does not begin with {GGUF_MAGIC.decode()}")


def check_disk(state_dir: Path) -> None:
    """Raises ConfigError when there is hardly room for logs and for what Ray writes."""
    for place in (state_dir, Path("/tmp")):  # noqa: S108 - looked at only
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < MIN_FREE_DISK_BYTES:
            raise ConfigError(
                f"{place}: {free_bytes >> 20} MiB of disk are free; at least {MIN_FREE_DISK_BYTES >> 20} MiB are needed"
            )
