"""An actor of kvrelay as a program of its own, without Ray: a worker or the router.

    python host_actor.py < JSON of ActorSpec, one line

It says where it can be reached, as a line of JSON. A router then takes lines with all its workers, and answers each
with "known". The end of standard input stops it, like the supervisor does; its log is standard error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Literal

import msgspec

import pd_engine.fake
from pd_core.config import Config
from pd_core.messages import WorkerEndpoint

GRACE_S = 1.0


class ActorSpec(msgspec.Struct, frozen=True):
    """head_bytes: of the fake engine's K, and V, of one token; None is its own small size"""

    role: Literal["prefill", "decode", "router"]
    name: str
    incarnation: str
    secret: bytes
    config: Config
    cache_dir: str
    head_bytes: int | None = None


class RouterAt(msgspec.Struct, frozen=True):
    """Where a router takes HTTP."""

    host: str
    port: int


def widen_blocks(head_bytes: int) -> None:
    """Blocks of the fake engine as large as a real model's. Before anybody else imports the layout."""
    pd_engine.fake.FAKE_LAYOUT = msgspec.structs.replace(pd_engine.fake.FAKE_LAYOUT, head_dim=head_bytes)


async def run(spec: ActorSpec, lines: asyncio.StreamReader) -> None:
    if spec.role == "router":
        await run_router(spec, lines)
    else:
        await run_worker(spec, lines)


async def run_worker(spec: ActorSpec, lines: asyncio.StreamReader) -> None:
    # Here and not above: they import the size of blocks.
    from decode_worker.actor import DecodeActor  # noqa: PLC0415
    from prefill_worker.actor import PrefillActor  # noqa: PLC0415

    sys.path.append(str(Path(__file__).parents[1] / "contract"))
    from known_ucx import known_ucx  # noqa: PLC0415 - it imports the transport

    kind = PrefillActor if spec.role == "prefill" else DecodeActor
    actor = kind(spec.name, spec.incarnation, spec.secret, spec.config, [], spec.cache_dir, None)
    with known_ucx():
        end = await actor.start()
    say(end)
    await lines.read()
    await actor.stop(GRACE_S)


async def run_router(spec: ActorSpec, lines: asyncio.StreamReader) -> None:
    from router.actor import RouterActor  # noqa: PLC0415 - workers do without it

    actor = RouterActor(spec.config, spec.secret, spec.cache_dir, None)
    say(RouterAt(*await actor.start()))
    while line := await lines.readline():
        await actor.set_workers(msgspec.json.decode(line, type=list[WorkerEndpoint]))
        say("known")
    await actor.stop(GRACE_S)


def say(thing: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(thing) + b"\n")
    sys.stdout.buffer.flush()


async def main() -> None:
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    spec = msgspec.json.decode(await lines.readline(), type=ActorSpec)
    if spec.head_bytes is not None:
        widen_blocks(spec.head_bytes)
    await run(spec, lines)


if __name__ == "__main__":
    asyncio.run(main())
