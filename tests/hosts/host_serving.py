"""The real router on a host of its own, workers on others, and a client beside the router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from host_actor import ActorSpec, RouterAt
from host_network import HostNetwork
from host_workers import CLEAN_S, read_endpoint, start_actor, until_so, worker_spec
from worker_rig import SECRET, expected_tokens

from pd_core.config import Config
from pd_core.messages import WorkerEndpoint
from pd_rpc.address import format_address

REPLY_S = 20.0
READY_S = 10.0


@dataclass
class Reply:
    """took_s: from the request to its end"""

    status: int
    body: dict[str, Any]
    took_s: float


@dataclass
class Serving:
    """A client of the router. Belongs to the event loop that made it, on the router's network."""

    http: httpx.AsyncClient

    async def complete(self, prompt: list[int], max_tokens: int) -> Reply:
        """A reply of 200 has been compared with the tokens that workers give."""
        body = {
            "model": "fake",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        began_s = time.monotonic()
        answer = await self.http.post("/v1/completions", json=body)
        reply = Reply(answer.status_code, answer.json(), time.monotonic() - began_s)
        if reply.status == 200:
            assert reply.body["choices"][0]["token_ids"] == expected_tokens(prompt, max_tokens)
        return reply

    async def health(self) -> dict[str, str]:
        """Of each worker, as the router sees it."""
        ready = (await self.http.get("/ready")).json()
        return {worker["name"]: worker["health"] for worker in ready["workers"]}

    async def are_ready(self, *names: str) -> bool:
        health = await self.health()
        return all(health.get(name) == "ready" for name in names)

    async def is_clean(self) -> bool:
        """Whether every block of every worker that answers is free."""
        ledgers = (await self.http.get("/debug/ledger")).json()["workers"].values()
        counts = [ledger["counts"] for ledger in ledgers if "counts" in ledger]
        return bool(counts) and all(count["free"] == count["total"] for count in counts)


@contextlib.asynccontextmanager
async def serving_on(
    network: HostNetwork,
    folder: Path,
    config: Config,
    places: Mapping[str, str],
    *,
    more: Sequence[WorkerEndpoint] = (),
    address_of: Callable[[str], str] | None = None,
    loopback: str = "127.0.0.1",
) -> AsyncIterator[Serving]:
    """A router and workers, ready; stopped at the end.

    places:     the host of each worker, by its name, as "prefill-0"
    more:       workers that the router is told of too, and that are not there
    address_of: what workers of a host bind to and tell others, IPv4 by default
    loopback:   where the router takes HTTP; it shows ledgers to nobody from elsewhere
    """
    address_of = address_of or network.ipv4
    http = msgspec.structs.replace(config.router, host=loopback, port=0)
    spec = ActorSpec(
        "router", "router", "router-boot", SECRET, msgspec.structs.replace(config, router=http), str(folder)
    )
    with network.hosts["router"].entered():
        programs = [start_actor(network, "router", spec, folder)]
        for name, host in places.items():
            role = name.partition("-")[0]
            programs.append(
                start_actor(network, host, worker_spec(role, name, config, address_of(host), folder), folder)
            )
        router_at = msgspec.json.decode(programs[0].read_line(), type=RouterAt)
        ends = [read_endpoint(program) for program in programs[1:]]
        programs[0].say(msgspec.json.encode([*ends, *more]).decode())
        assert programs[0].read_line() == '"known"'
        url = f"http://{format_address(router_at.host, router_at.port)}"
        async with httpx.AsyncClient(base_url=url, timeout=REPLY_S) as client:
            serving = Serving(client)
            try:
                await until_so(lambda: serving.are_ready(*places), READY_S)
                yield serving
                await until_so(serving.is_clean, CLEAN_S)
            except BaseException as error:
                for program in programs:
                    error.add_note(f"{program.name}:\n{program.log.read_text()[-3000:]}")
                raise
        for program in reversed(programs):
            await asyncio.to_thread(program.stop)
