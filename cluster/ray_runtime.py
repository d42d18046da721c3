"""A Ray of our own on this machine: private, on loopback alone, and gone without a trace.

Ray by itself would keep its access token readable by everybody in the user's home, put world-writable folders into
/tmp, listen on all interfaces, run actors at low priority and report usage. Each of these is set right here, with the
switches that Ray reads from its environment.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import ray
from ray._private import ray_constants

from cluster.orphans import adopt_orphans
from cluster.processes import kill_remaining, list_descendants
from cluster.ray_watch import RayWatch
from pd_core.errors import ConfigError, Unavailable

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket on Linux."""
SOCKET_BELOW = "/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.x"
"""What Ray adds to its folder, at its longest."""
TEMP = Path("/tmp")  # noqa: S108 - what we make there is private; TMPDIR may be too long for sockets
PREFIX = "kvrelay-"
OWNER = "owner"
REMOVE_TRIES = 10
REMOVE_RETRY_S = 0.05
"""Ray's threads in this process may still put a file into a folder that is just being emptied."""
OBJECT_STORE_BYTES = 100 << 20
"""Nothing of ours goes through the object store; this is a little above the least that Ray accepts."""
SETTINGS = {
    "worker_niceness": 0,  # by default actors run at nice 15
    # Reports for a dashboard that we do not start. They cost every actor processor time, the idle ones too.
    "enable_metrics_collection": False,
    "event_stats": False,
    "io_context_event_loop_lag_collection_interval_ms": 0,
    "task_events_report_interval_ms": 0,
}
"""Ray's own, of its processes and of every actor's."""
logger = logging.getLogger(__name__)


class RayRuntime:
    """Starts Ray for this process and ends it. Both block; both may run in a thread that lives until the end.

    (The kernel ends Ray's processes together with the thread that started them.)
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.folder: Path | None = None
        self._owner: int | None = None
        self._environment: dict[str, str] | None = None
        self._is_clustered = True
        self._watch: RayWatch | None = None

    def start(self, num_actors: int, num_gpus: int, on_lost: Callable[[str], None] | None = None) -> None:
        """num_gpus: how many Ray may give to actors, each to one alone.

        Raises Unavailable when Ray is running in this process already, or will not start; ConfigError when
        its folder cannot be made.

        on_lost: told, in another thread, which of Ray's own processes died before `stop`. Ray's library is of no use
                 then, and cannot even be ended: it would hang, and abort this process later.
        """
        if ray.is_initialized():
            raise Unavailable("Ray is running in this process already")
        sweep_abandoned([*self._state_dir.glob(f"run/*/{OWNER}"), *TEMP.glob(f"{PREFIX}*/{OWNER}")])
        try:
            self.folder = make_private_folder(self._state_dir)
        except OSError as error:
            raise ConfigError(f"no folder for Ray can be made in {self._state_dir}: {error.strerror}") from error
        self._owner = own(self.folder)
        token = self.folder / "token"
        write_private(token, secrets.token_hex(32))
        self._set_switches(token)
        logging.getLogger("ray").setLevel(logging.ERROR)
        adopt_orphans(wanted=True)
        began_s = time.monotonic()
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=num_actors,  # Ray starts so many processes at once; actors themselves ask for no cpu
                num_gpus=num_gpus,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(self.folder / "r"),  # this one Ray opens to everybody; ours around it stays closed
                _plasma_directory=str(self.folder),  # /dev/shm is small in containers, and nothing large goes there
                _system_config=SETTINGS,
            )
            if on_lost is not None:
                self._watch = RayWatch(on_lost)
        except Exception as error:
            self.stop()
            raise Unavailable(f"Ray did not start: {error}") from error
        logger.info("ray started", extra={"took_s": round(time.monotonic() - began_s, 3)})

    def stop(self) -> list[int]:
        """Ends Ray and removes its files. Gives the pids of processes that could not be ended: none, unless stuck."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        processes = list_descendants()
        ray.shutdown()
        stuck = [process.pid for process in kill_remaining(processes, grace_s=2.0)]
        self.remove_files()
        self._reset_switches()
        adopt_orphans(wanted=False)
        return stuck

    def remove_files(self) -> None:
        folder, self.folder = self.folder, None
        if folder is not None:
            _remove(folder)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def _set_switches(self, token: Path) -> None:
        """Ray's own switches, for this process and all that it starts."""
        self._environment = dict(os.environ)
        os.environ.pop("RAY_AUTH_MODE", None)  # unset, a local Ray asks for a token: nobody may switch that off
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # The name says Windows; what it does is make the node's address 127.0.0.1, and then Ray listens nowhere else.
        # Ray's processes read it from the environment, this one has read it already.
        os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
        self._is_clustered = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False

    def _reset_switches(self) -> None:
        if self._environment is not None:
            os.environ.clear()
            os.environ.update(self._environment)
            ray_constants.ENABLE_RAY_CLUSTER = self._is_clustered
            self._environment = None


def make_private_folder(state_dir: Path) -> Path:
    """A fresh folder that only we can enter: below the state folder if socket paths stay short enough, else in /tmp."""
    run = state_dir / "run"
    if len(str(run / "12345678") + SOCKET_BELOW) > MAX_SOCKET_PATH:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=TEMP))  # mkdtemp: 0700 and fresh
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=run))


def _remove(folder: Path) -> None:
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(REMOVE_RETRY_S)
    logger.error("a folder cannot be removed", extra={"folder": str(folder)})


def own(folder: Path) -> int:
    """Marks the folder as in use for as long as this process lives, however it ends. Close the descriptor to end it."""
    descriptor = os.open(folder / OWNER, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def sweep_abandoned(owners: Iterable[Path]) -> None:
    """Removes the folders of these files of `own` whose process was killed before it could do so itself."""
    for owner in owners:
        try:
            if owner.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(owner, os.O_RDWR)
        except OSError:  # somebody else's, or just removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
        except BlockingIOError:  # in use
            pass
        finally:
            os.close(descriptor)


def write_private(file: Path, text: str) -> None:
    """A new file that only we can read, from its first moment on."""
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
