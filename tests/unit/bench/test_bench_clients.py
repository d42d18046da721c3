"""The HTTP client against a scripted server, and the engine process as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from load_tests.clusters import RunningCluster, WorkerProcess
from load_tests.engine_client import engine_process
from load_tests.gateway import Gateway
from load_tests.lab import changed
from load_tests.request_timeline import Chunk, Prefill, Transfer
from load_tests.streams import running_streams, wait_first_ended
from pd_core.config import Config, ModelConfig
from pd_core.errors import ConfigError, DeadlineExceeded, EngineError, ProtocolError, Unavailable

GAP_S = 0.05


def event(ids: list[int], finish: str | None = None) -> bytes:
    body = {"id": "cmpl-1", "choices": [{"text": "x", "token_ids": ids, "finish_reason": finish}]}
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TIMELINE = {
    "id": "cmpl-1",
    "prefill": {"compute_ms": 2.5, "num_chunks": 1, "chunks": [{"start": 0, "num_tokens": 16, "took_ms": 2.5}]},
    "transfer": {"path": "shm", "num_bytes": 360, "exposed_ms": 1.5, "gb_per_s": None},
}
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Script:
    """A server that streams one token a GAP_S, as many as were asked for."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.num_left = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /v1/requests/"):
                return self._json(writer, TIMELINE)
            if head.startswith("GET /metrics"):
                return self._plain(writer, b'# HELP a b\na{worker="x"} 2.0\na{worker="y"} 3\nab 7\n')
            length = int(head.lower().partition("content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            await self._stream(writer, body["max_tokens"])
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_left += 1
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return None

    async def _stream(self, writer: asyncio.StreamWriter, num_tokens: int) -> None:
        if num_tokens == 400:
            return self._json(writer, {"error": {"message": "too long"}}, "400 Bad Request")
        for token in range(num_tokens):
            await asyncio.sleep(GAP_S)
            is_last = token == num_tokens - 1
            piece = event([token], "length" if is_last else None) + (END if is_last else b"")
            writer.write((HEAD if token == 0 else b"") + piece)
            await writer.drain()
        return None

    def _json(self, writer: asyncio.StreamWriter, body: object, status: str = "200 OK") -> None:
        self._plain(writer, json.dumps(body).encode(), status)

    def _plain(self, writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK") -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Gateway, Script]]:
    script = Script()
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield Gateway(RunningCluster("127.0.0.1", port, "tiny", 0, [])), script
    await server.wait_closed()


async def test_a_stream_is_asked_for_greedily_and_its_tokens_have_their_moments():
    async with scripted() as (gateway, script):
        stream = await gateway.complete([5, 6, 7], 3)
    assert stream.tokens == [0, 1, 2]
    assert stream.ttft_s >= GAP_S
    assert stream.moments == sorted(stream.moments)
    assert stream.moments[2] - stream.moments[0] >= GAP_S
    assert script.bodies == [
        {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    ]


async def test_timelines_and_metrics_are_read():
    async with scripted() as (gateway, _):
        timeline = await gateway.timeline("cmpl-1")
        assert timeline.transfer == Transfer("shm", 360, 1.5)
        assert timeline.prefill == Prefill([Chunk(0, 16, 2.5)])
        assert await gateway.metric("a") == 5.0
        assert await gateway.metric("nothing") == 0.0


async def test_a_refusal_has_a_status_and_a_time():
    async with scripted() as (gateway, _):
        with pytest.raises(Unavailable, match=r"HTTP 400.*too long"):
            await gateway.complete([1], 400)
        refusal = await gateway.ask_status([1], 400)
        assert refusal.status == 400
        assert 0 <= refusal.took_s < 5.0


async def test_running_streams_have_all_begun_and_are_closed_when_they_are_left():
    async with scripted() as (gateway, script):
        async with running_streams(gateway, [[1], [2]], 1000, with_token_ids=True) as exchanges:
            assert all(exchange.pieces for exchange in exchanges)
        with contextlib.suppress(ProtocolError):
            exchanges[0].reply()
        async with asyncio.timeout(5.0):
            while script.num_left < 2:
                await asyncio.sleep(0.01)


async def test_the_first_of_several_streams_to_end_ends_the_wait():
    async with scripted() as (gateway, _), gateway.stream([1], 2) as short, gateway.stream([1], 1000) as long:
        await wait_first_ended([short, long])
        assert parse_ok(short)
        assert not parse_ok(long)


def parse_ok(exchange) -> bool:
    try:
        return bool(exchange.reply().events)
    except ProtocolError:
        return False


async def test_a_request_that_does_not_end_in_time_is_given_up():
    async with scripted() as (gateway, _):
        with pytest.raises(DeadlineExceeded):
            await gateway.complete([1], 1000, deadline_s=0.1)


async def test_nobody_listening_is_said_at_once():
    async with scripted() as (gateway, _):
        pass
    with pytest.raises(Unavailable, match="no connection to"):
        await gateway.complete([1], 1)


async def test_an_engine_process_answers_from_its_cores_and_ends_with_its_input(tmp_path: Path):
    config = Config(model=ModelConfig(path="fake"))
    async with engine_process([0]) as client:
        assert (await client.load(config, 1, tmp_path)).vocab_size == 97
        assert await client.time_prefill(64, 32, seed=1) > 0
        assert len(await client.time_decode([16], 4)) == 4
        assert await client.generate([1, 1, 1], 1, 16) == [9]
        with pytest.raises(EngineError, match="asked for TimePrefill"):
            await client.time_prefill(5000, 512, seed=1)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5.0


async def test_an_engine_process_that_is_killed_is_missed_at_once(tmp_path: Path):
    async with engine_process([0]) as client:
        client.child.kill()
        with pytest.raises(EngineError, match=r"ended instead of answering|was gone before Load"):
            await client.load(Config(), 1, tmp_path)


def test_a_cluster_without_a_role_says_so():
    cluster = RunningCluster("h", 1, "m", 2, [WorkerProcess("decode-0", "decode", 3, [0, 1])])
    assert cluster.worker("decode").cores == [0, 1]
    with pytest.raises(ConfigError, match="needs a prefill worker"):
        cluster.worker("prefill")


def test_a_bench_changes_only_the_fields_that_it_names():
    config = changed(Config(), prefill={"num_workers": 0}, decode={"num_blocks": 16})
    assert (config.prefill.num_workers, config.decode.num_blocks) == (0, 16)
    assert config.prefill.chunk_tokens == Config().prefill.chunk_tokens
    assert config.router == Config().router
