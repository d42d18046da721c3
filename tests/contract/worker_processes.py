"""A prefill and a decode worker as processes of their own, that tests stop and kill; and the router's side of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from waiting import until
from worker_process import Boot
from worker_rig import CALL_S, SECRET, Rig, connect

from pd_core.config import Config
from pd_core.ledger import LedgerCounts
from pd_core.messages import ReadLedger, WorkerEndpoint
from pd_rpc.client import RpcClient

SCRIPT = Path(__file__).with_name("worker_process.py")
START_S = 30.0


class WorkerProcess:
    """One boot."""

    def __init__(self, process: asyncio.subprocess.Process, end: WorkerEndpoint, client: RpcClient) -> None:
        self.end = end
        self.client = client
        self._process = process

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    @classmethod
    async def start(cls, role: str, name: str, incarnation: str, config: Config) -> WorkerProcess:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, SCRIPT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[2])])},
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            boot = Boot(role, name, incarnation, SECRET.hex(), config)
            process.stdin.write(msgspec.json.encode(boot) + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
            end = msgspec.json.decode(line, type=WorkerEndpoint)
            return cls(process, end, await connect(end))
        except BaseException:
            process.kill()
            await process.wait()
            raise

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.end.pid, number)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self.client.close()

    async def counts(self) -> LedgerCounts:
        counts: LedgerCounts = (await self.client.call(ReadLedger(), CALL_S)).report.counts
        return counts

    async def wait_idle(self, within_s: float) -> None:
        """Until all its blocks are free. Fails when they are not within so long."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        while not (counts := await self.counts()).is_idle:
            assert loop.time() < ends_s, f"after {within_s:g} s: {counts}"
            await asyncio.sleep(0.02)


class WorkerProcesses:
    """Starts boots; all of them are killed at the end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._numbers = itertools.count(1)
        self._started: list[WorkerProcess] = []

    async def start(self, role: str) -> WorkerProcess:
        number = next(self._numbers)
        worker = await WorkerProcess.start(role, f"{role}-{number}", f"boot-{number}", self._config)
        self._started.append(worker)
        return worker

    async def kill_all(self) -> None:
        for worker in self._started:
            if worker.lives:
                await worker.kill()


@contextlib.asynccontextmanager
async def worker_processes(config: Config) -> AsyncIterator[WorkerProcesses]:
    processes = WorkerProcesses(config)
    try:
        yield processes
    finally:
        await processes.kill_all()


def pair_of(prefill: WorkerProcess, decode: WorkerProcess) -> Rig:
    """What runs go through; the workers themselves cannot be looked into."""
    inside: Any = None
    return Rig(inside, inside, prefill.end, decode.end, prefill.client, decode.client)


async def until_dead(worker: WorkerProcess) -> None:
    await until(lambda: not worker.lives)
