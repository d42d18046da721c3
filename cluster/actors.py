"""Which classes fill the seats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ActorClasses:
    """Plain classes, wrapped when they are launched, or classes that Ray has wrapped already.

    prefill, decode: (name, incarnation, secret, config, cores, cache_dir, log_path); start() -> WorkerEndpoint
    router:          (config, secret, cache_dir, log_path); start() -> (host, port); set_workers(endpoints); ready()
    all:             stop(grace_s); run_until_stopped(), which only returns at stop
    """

    prefill: Any
    decode: Any
    router: Any


def real_actors() -> ActorClasses:
    """The classes that serve. Imported here, not at the top: the command line starts faster without them."""
    from decode_worker.actor import DecodeActor  # noqa: PLC0415
    from prefill_worker.actor import PrefillActor  # noqa: PLC0415
    from router.actor import RouterActor  # noqa: PLC0415

    return ActorClasses(prefill=PrefillActor, decode=DecodeActor, router=RouterActor)
