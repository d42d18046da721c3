"""Workers on hosts of their own, and a router of thirty lines (worker_rig.Run) on a third."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from host_actor import ActorSpec
from host_network import HostNetwork
from host_processes import Program
from worker_rig import CALL_S, SECRET, Rig, Run, connect

from pd_core.config import Config, DecodeConfig, FakeEngineConfig, ModelConfig, PrefillConfig, TransferConfig
from pd_core.ledger import LedgerCounts
from pd_core.messages import LedgerSnapshot, ReadLedger, WatchStatus, WorkerEndpoint, WorkerStatus
from pd_core.request import GenerateRequest
from pd_core.ticket import Ticket
from pd_rpc.client import RpcClient

LEASE_S = 1.5
CLEAN_S = LEASE_S + 2.0
"""After whatever happens, every block of the decode worker is back within so long."""
CHUNK_TOKENS = 32
CONTEXT_TOKENS = 640
POOL_BLOCKS = 48
ASK_S = 0.03
"""Between two questions to a worker."""


def host_config(*, path: str = "tcp", step_s: float = 0.0, lease_s: float = LEASE_S, push_s: float = 2.0) -> Config:
    """Small pools and chunks. step_s: of every step of either engine, so that each chunk is a push of its own."""
    return Config(
        model=ModelConfig(path="fake", fake=FakeEngineConfig(context_tokens=CONTEXT_TOKENS, step_s=step_s)),
        prefill=PrefillConfig(num_blocks=POOL_BLOCKS, chunk_tokens=CHUNK_TOKENS),
        decode=DecodeConfig(num_blocks=POOL_BLOCKS),
        transfer=TransferConfig(path=path, lease_s=lease_s, push_timeout_s=push_s),  # type: ignore[arg-type]
    )


@dataclass
class HostRig:
    """What worker_rig.Run drives, across hosts. Belongs to the event loop that made it, on the router's network."""

    network: HostNetwork
    prefill: Program
    decode: Program
    prefill_end: WorkerEndpoint
    decode_end: WorkerEndpoint
    to_prefill: RpcClient
    to_decode: RpcClient

    def run(self, request: GenerateRequest, bend: Callable[[Ticket], Ticket] = lambda ticket: ticket) -> HostRun:
        """bend: makes of the granted ticket the one that the prefill worker gets"""
        return HostRun(self, request, bend)

    async def status(self, client: RpcClient) -> WorkerStatus:
        async with client.stream(WatchStatus(interval_s=1.0), CALL_S) as statuses:
            status = await anext(statuses)
        assert isinstance(status, WorkerStatus)
        return status

    async def path_to_decode(self) -> str:
        """What the prefill worker tells people about its way to the decode worker."""
        return (await self.status(self.to_prefill)).kv_paths[self.decode_end.name]

    async def reconnect(self) -> None:
        """New connections to both workers: the old ones may have fallen silent."""
        await self.disconnect()
        self.to_prefill, self.to_decode = await connect(self.prefill_end), await connect(self.decode_end)

    async def disconnect(self) -> None:
        await asyncio.gather(self.to_prefill.close(), self.to_decode.close())


class HostRun(Run):
    """One request through the two workers of a HostRig."""

    def __init__(self, rig: HostRig, request: GenerateRequest, bend: Callable[[Ticket], Ticket]) -> None:
        super().__init__(cast(Rig, rig), request, attempt=1)  # all it takes are the two connections
        self._bend = bend

    async def _prefill_leg(self) -> None:
        await self.granted.wait()
        assert self.ticket is not None
        self.ticket = self._bend(self.ticket)
        await super()._prefill_leg()


async def counts_of(client: RpcClient) -> LedgerCounts:
    snapshot: LedgerSnapshot = await client.call(ReadLedger(), CALL_S)
    return snapshot.report.counts


async def until_idle(client: RpcClient, within_s: float = CLEAN_S) -> float:
    """Until every block of the worker is free; how long it took."""

    async def is_idle() -> bool:
        return (await counts_of(client)).is_idle

    return await until_so(is_idle, within_s)


async def until_clean(end: WorkerEndpoint) -> None:
    """The same over a connection of its own."""
    async with await connect(end) as client:
        await until_idle(client)


async def until_so(is_so: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Seconds until the answer was yes. Fails when it is not within so long."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not await is_so():
        assert loop.time() - began_s < within_s, f"it is not so after {within_s:g} s"
        await asyncio.sleep(ASK_S)
    return loop.time() - began_s


def start_actor(network: HostNetwork, host: str, spec: ActorSpec, folder: Path) -> Program:
    """Does not wait until it serves: several can start at once."""
    program = network.hosts[host].start("host_actor.py", [], folder / f"{spec.name}.log")
    program.say(msgspec.json.encode(spec).decode())
    return program


def worker_spec(
    role: str, name: str, config: Config, address: str, folder: Path, head_bytes: int | None = None
) -> ActorSpec:
    """address: what the worker binds to and tells others"""
    transfer = msgspec.structs.replace(config.transfer, host=address)
    config = msgspec.structs.replace(config, transfer=transfer)
    return ActorSpec(role, name, f"{name}-boot", SECRET, config, str(folder), head_bytes)  # type: ignore[arg-type]


def read_endpoint(program: Program) -> WorkerEndpoint:
    return msgspec.json.decode(program.read_line(), type=WorkerEndpoint)


@contextlib.asynccontextmanager
async def workers_on(
    network: HostNetwork,
    folder: Path,
    config: Config | None = None,
    *,
    hosts: tuple[str, str] = ("prefill", "decode"),
    addresses: tuple[str, str] | None = None,
    reached_at: tuple[str, str] | None = None,
    head_bytes: int | None = None,
) -> AsyncIterator[HostRig]:
    """A prefill and a decode worker on these hosts, connected to from the router's; stopped at the end.

    addresses:  what they bind to and tell others, IPv4 by default
    reached_at: numerical addresses for us, who do not know the names that only hosts know

    When the block ends every block of both pools must be free without a stop: a test of anything is a test of leaks.
    """
    config = config or host_config()
    addresses = addresses or (network.ipv4(hosts[0]), network.ipv4(hosts[1]))
    reached_at = reached_at or addresses
    with network.hosts["router"].entered():
        prefill, decode = programs = [
            start_actor(network, host, worker_spec(role, f"{role}-0", config, address, folder, head_bytes), folder)
            for role, host, address in zip(("prefill", "decode"), hosts, addresses, strict=True)
        ]
        ends = [
            msgspec.structs.replace(read_endpoint(program), host=host)
            for program, host in zip(programs, reached_at, strict=True)
        ]
        to_prefill, to_decode = [await connect(end) for end in ends]
        rig = HostRig(network, prefill, decode, ends[0], ends[1], to_prefill, to_decode)
        try:
            yield rig
            await rig.disconnect()
            running = [end for program, end in zip(programs, ends, strict=True) if program.is_running]
            await asyncio.gather(*(until_clean(end) for end in running))
        except BaseException as error:
            for program in programs:
                error.add_note(f"{program.name}:\n{program.log.read_text()[-3000:]}")
            raise
        finally:
            await rig.disconnect()
        for program in programs:
            if program.is_running:
                program.stop()
