"""A cluster of real processes with the fake engine, and clients that treat it badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster.actors import real_actors
from cluster.launch import Cluster
from pd_core.config import Config, parse_config
from pd_engine.fake import DECODE_FACTOR, PREFILL_FACTOR
from pd_model.fake import fake_model

LEASE_S = 1.5
ERROR_S = 3.0
"""After whatever happens, a client knows within so long."""
LEAK_FREE_S = max(5.0, LEASE_S + 2.0)
RESTART_S = 30.0
ROUTE = "/v1/chat/completions"


def slow_config(*, token_s: float = 0.0, step_s: float = 0.0, **sections: dict[str, Any]) -> Config:
    """token_s: time of a prompt token in prefill, step_s: of every step; sections overwrite."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "fake", "fake": {"token_s": token_s, "step_s": step_s, "context_tokens": 1024}},
        "router": {"port": 0},
        "prefill": {"num_blocks": 128, "chunk_tokens": 32},
        "decode": {"num_blocks": 256},
        "transfer": {"lease_s": LEASE_S},
        "heartbeat": {"dead_s": 3.0},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return parse_config(tree)


@dataclass
class Outcome:
    """What a streaming client saw. took_s: from the request to its end."""

    status: int
    events: list[str] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    was_cut: bool = False

    @property
    def is_done(self) -> bool:
        return "[DONE]" in self.events

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self._chunks if "choices" in chunk for token in _ids(chunk)]

    @property
    def error(self) -> dict[str, Any] | None:
        """Of the body, or of an event after the headers."""
        found = [chunk["error"] for chunk in [self.body, *self._chunks] if "error" in chunk]
        return found[0] if found else None

    @property
    def _chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]


def _ids(chunk: dict[str, Any]) -> list[int]:
    return [token for choice in chunk["choices"] for token in choice.get("token_ids", [])]


@dataclass
class FakeCluster:
    """A running cluster and an HTTP client to it."""

    cluster: Cluster
    http: httpx.AsyncClient

    def body(self, text: str, max_tokens: int | None, **more: Any) -> dict[str, Any]:
        tokens = {} if max_tokens is None else {"max_tokens": max_tokens}
        message = {"role": "user", "content": text}
        return {"model": "fake", "messages": [message], "return_token_ids": True, "ignore_eos": True} | tokens | more

    async def ask(self, text: str, max_tokens: int | None, **more: Any) -> Outcome:
        began_s = time.monotonic()
        headers = more.pop("headers", {})
        reply = await self.http.post(ROUTE, json=self.body(text, max_tokens, **more), headers=headers)
        return Outcome(reply.status_code, body=reply.json(), took_s=time.monotonic() - began_s)

    async def stream(
        self, text: str, max_tokens: int, until_tokens: int | None = None, on_event: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Reads to the end, or leaves after so many tokens. on_event: called after each event."""
        began_s = time.monotonic()
        body = self.body(text, max_tokens, stream=True)
        async with self.http.stream("POST", ROUTE, json=body) as reply:
            outcome = Outcome(reply.status_code)
            if reply.status_code != 200:
                outcome.body = json.loads(await reply.aread())
            else:
                try:
                    async for line in reply.aiter_lines():
                        if line.startswith("data: "):
                            outcome.events.append(line.removeprefix("data: "))
                            on_event()
                        if until_tokens is not None and len(outcome.token_ids) >= until_tokens:
                            break
                except httpx.RemoteProtocolError:
                    outcome.was_cut = True
        outcome.took_s = time.monotonic() - began_s
        return outcome

    def signal(self, worker: str, number: signal.Signals) -> int:
        pid = self.cluster.pids[worker]
        os.kill(pid, number)
        return pid

    async def break_engine(self, worker: str) -> None:
        """Its engine answers with no token at all from now on, which no engine may: a fault inside the process."""
        [seat] = [seat for seat in self.cluster._workers if seat.name == worker]
        await seat._actor.__ray_call__.remote(
            lambda actor: setattr(actor._worker.shell.engine, "step", lambda steps, is_cancelled: [])
        )

    async def ledgers(self) -> dict[str, Any]:
        ledgers: dict[str, Any] = (await self.http.get("/debug/ledger")).json()["workers"]
        return ledgers

    async def wait_counts(self, worker: str, state: str, within_s: float = 5.0) -> None:
        """Until the worker has a block in this state."""
        began_s = time.monotonic()
        while not (await self.ledgers())[worker]["counts"][state]:
            assert time.monotonic() - began_s < within_s, await self.ledgers()
            await asyncio.sleep(0.01)

    async def metric(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    async def wait_no_leak(self, within_s: float = LEAK_FREE_S) -> float:
        """Until no block of any pool is anything but free; how long it took."""
        began_s = time.monotonic()
        while True:
            ledgers = await self.ledgers()
            if ledgers and all(
                w.get("counts", {}).get("free") == w.get("counts", {}).get("total", -1) for w in ledgers.values()
            ):
                return time.monotonic() - began_s
            assert time.monotonic() - began_s < within_s, ledgers
            await asyncio.sleep(0.05)

    async def wait_served(self, within_s: float = RESTART_S) -> Outcome:
        """Until a request is served again; every one before is refused quickly and openly."""
        began_s = time.monotonic()
        while True:
            outcome = await self.ask("again", 4)
            if outcome.status == 200:
                return outcome
            assert outcome.status == 503, outcome
            assert outcome.took_s < ERROR_S, outcome
            assert time.monotonic() - began_s < within_s
            await asyncio.sleep(0.1)


def expected_ids(text: str, max_tokens: int, *, by_decode_alone: bool = False) -> list[int]:
    """The fake stream by hand: prefill's factor for the first token if there is a prefill worker, else decode's."""
    assets = fake_model()
    rendered = assets.chat_template.render([{"role": "user", "content": text}])
    context = assets.tokenizer.encode(rendered)
    made: list[int] = []
    for number in range(max_tokens):
        factor = PREFILL_FACTOR if number == 0 and not by_decode_alone else DECODE_FACTOR
        made.append(sum((context + made)[-3:]) * factor % assets.vocab_size)
    return made


def num_prompt_tokens(text: str) -> int:
    assets = fake_model()
    return len(assets.tokenizer.encode(assets.chat_template.render([{"role": "user", "content": text}])))


@contextlib.asynccontextmanager
async def fake_cluster(config: Config, cache_dir: Path) -> AsyncIterator[FakeCluster]:
    """Started, and at the end stopped; a test whose cluster leaks a block on the way fails here at the latest."""
    cluster = Cluster(
        actors=real_actors(), cache_dir=cache_dir, log_files=None, limits=None, on_progress=lambda _: None
    )
    address = await cluster.start(config)
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=address.url, timeout=60.0, limits=limits) as http:
        try:
            fake = FakeCluster(cluster, http)
            yield fake
            await fake.wait_no_leak()
        finally:
            await cluster.stop(grace_s=2.0)
