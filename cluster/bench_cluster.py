"""Clusters for benches: `kvrelay up` as a process of its own, seen from outside like a user's.

A bench's own process must stay light, and a Ray of the bench's would be none of the user's: so the launcher is not
called, the command is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from load_tests.clusters import RunningCluster, WorkerProcess
from pd_core.config import Config
from pd_core.errors import DeadlineExceeded, Unavailable, WorkerLost

START_S = 120.0
STOP_S = 30.0
MAX_LINE_BYTES = 1 << 20
PROGRAM = "from cluster.cli import main; main()"
LAST_WORDS_CHARS = 2000


class _Worker(msgspec.Struct):
    name: str
    role: Literal["prefill", "decode"]
    pid: int


class _Ready(msgspec.Struct):
    """What `kvrelay up --json` prints when it is ready."""

    event: Literal["ready"]
    url: str
    model: str
    workers: list[_Worker]


@asynccontextmanager
async def cluster_process(config: Config, on_progress: Callable[[str], None]) -> AsyncIterator[RunningCluster]:
    """A cluster on any free port, ready on entry; at the end every process of it is gone.

    Raises Unavailable with what it said when it does not start, DeadlineExceeded, WorkerLost when it does not end.
    """
    on_progress(f"starting a cluster: {_described(config)}")
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_bytes(msgspec.json.encode(_on_any_port(config)))  # JSON is YAML
        with (Path(folder) / "stderr").open("w+b") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, "up", "--json", "--config", str(file)),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # Ctrl-C on a terminal is for the bench, which ends its clusters itself
            )
            try:
                yield _seen(await _wait_ready(process, Path(stderr.name)), process.pid)
            finally:
                await asyncio.shield(_stop(process))


def _on_any_port(config: Config) -> Config:
    router = msgspec.structs.replace(config.router, host="127.0.0.1", port=0)
    return msgspec.structs.replace(config, router=router)


def _described(config: Config) -> str:
    workers = f"{config.prefill.num_workers} prefill, {config.decode.num_workers} decode workers"
    return f"{workers}, KV by {config.transfer.path}"


async def _wait_ready(process: asyncio.subprocess.Process, stderr: Path) -> _Ready:
    assert process.stdout is not None  # noqa: S101 - a pipe, as asked for
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
    except TimeoutError as error:
        raise DeadlineExceeded(f"a cluster was not ready after {START_S:g} s; {_last_words(stderr)}") from error
    try:
        return msgspec.json.decode(line, type=_Ready)
    except msgspec.DecodeError as error:
        raise Unavailable(f"a cluster did not start: {line.decode('utf-8', 'replace')}{_last_words(stderr)}") from error


def _last_words(stderr: Path) -> str:
    return stderr.read_text("utf-8", "replace")[-LAST_WORDS_CHARS:].strip()


def _seen(ready: _Ready, pid: int) -> RunningCluster:
    """The cluster with its processes' cores. Raises Unavailable when nobody of it listens where it says."""
    address = urllib.parse.urlsplit(ready.url)
    host, port = address.hostname or "", address.port or 0
    try:
        workers = [
            WorkerProcess(worker.name, worker.role, worker.pid, computing_cores(worker.pid)) for worker in ready.workers
        ]
        return RunningCluster(host, port, ready.model, _listener(pid, port), workers)
    except psutil.Error as error:
        raise Unavailable(f"a process of the cluster cannot be looked at: {error}") from error


def computing_cores(pid: int) -> list[int]:
    """Where a worker computes: those of its threads that do are tied to fewer cores than the others, or all to none.

    Raises psutil.Error when there is no such process.
    """
    found = []
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            found.append(sorted(os.sched_getaffinity(thread.id)))
    return min(found, key=len)


def _listener(pid: int, port: int) -> int:
    """The process among the descendants that listens on the port: the router's."""
    for process in psutil.Process(pid).children(recursive=True):
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return process.pid
    raise Unavailable(f"no process of the cluster listens on port {port}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """As a user would; what does not end is killed with all that came from it, and that is an error."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError as error:
        for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            child.kill()
        await process.wait()
        raise WorkerLost(f"a cluster did not end within {STOP_S:g} s of SIGTERM and was killed") from error
