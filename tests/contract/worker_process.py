"""A worker in a process of its own, without Ray, to be stopped or killed: the actor's plain class.

Reads a Boot as one line of JSON, answers with the worker's endpoint, and lives until its input ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import msgspec
from known_ucx import known_ucx

from decode_worker.actor import DecodeActor
from pd_core.config import Config
from prefill_worker.actor import PrefillActor


class Boot(msgspec.Struct):
    """What the process is told. secret: as hex"""

    role: str
    name: str
    incarnation: str
    secret: str
    config: Config


async def live(boot: Boot) -> None:
    actor_class = PrefillActor if boot.role == "prefill" else DecodeActor
    secret = bytes.fromhex(boot.secret)
    actor = actor_class(boot.name, boot.incarnation, secret, boot.config, [], "/nowhere", "/dev/null")
    with known_ucx():
        end = await actor.start()
    sys.stdout.write(msgspec.json.encode(end).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await actor.stop(0.5)


if __name__ == "__main__":
    asyncio.run(live(msgspec.json.decode(sys.stdin.readline(), type=Boot)))
    logging.shutdown()
