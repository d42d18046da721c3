"""The cluster that a bench measures, as far as a bench can see it: an address and processes.

Who can start one is handed in from above: this package does not know the launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import msgspec

from pd_core.config import Config
from pd_core.errors import ConfigError


class WorkerProcess(msgspec.Struct, frozen=True):
    """cores: those that it computes on; unless the config says otherwise it has as many threads."""

    name: str
    role: Literal["prefill", "decode"]
    pid: int
    cores: list[int]


class RunningCluster(msgspec.Struct, frozen=True):
    """host, port: of the HTTP gateway, in the router's process; model: what clients have to call it"""

    host: str
    port: int
    model: str
    router_pid: int
    workers: list[WorkerProcess]

    def worker(self, role: Literal["prefill", "decode"]) -> WorkerProcess:
        """The first of that role. Raises ConfigError when there is none: the bench cannot measure such a cluster."""
        for worker in self.workers:
            if worker.role == role:
                return worker
        raise ConfigError(f"the bench needs a {role} worker; the cluster has none", param=f"{role}.num_workers")


class ClusterStarter(Protocol):
    """Starts clusters of their own for benches."""

    def __call__(
        self, config: Config, on_progress: Callable[[str], None]
    ) -> AbstractAsyncContextManager[RunningCluster]:
        """Ready on entry, on any free port; at the end nothing of it is left. Raises KvrelayError."""
        ...
