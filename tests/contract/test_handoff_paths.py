"""Over which path a handoff went, as the config allows it and as the router is told."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from leaks import no_leaks
from worker_rig import SECRET, Rig, Run, check_stream, connect, make_request

from decode_worker.actor import DecodeActor
from pd_core.config import Config, DecodeConfig, FakeEngineConfig, ModelConfig, PrefillConfig, TransferConfig
from pd_core.errors import KvrelayError
from pd_worker.incoming import IncomingHandoff
from prefill_worker.actor import PrefillActor

PathName = Literal["auto", "shm", "tcp"]
PROMPT_TOKENS = 3 * 32 + 5


def config(path: PathName) -> Config:
    """Steps take so long that each chunk is a push of its own."""
    return Config(
        model=ModelConfig(path="fake", fake=FakeEngineConfig(context_tokens=256, step_s=0.03)),
        prefill=PrefillConfig(num_blocks=32, chunk_tokens=32),
        decode=DecodeConfig(num_blocks=32),
        transfer=TransferConfig(path=path, lease_s=1.0, push_timeout_s=2.0),
    )


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@contextlib.asynccontextmanager
async def actors(prefill_path: PathName, decode_path: PathName, tmp_path: Path) -> AsyncIterator[Rig]:
    prefill = PrefillActor("prefill-0", "p-boot", SECRET, config(prefill_path), [], str(tmp_path), None)
    decode = DecodeActor("decode-0", "d-boot", SECRET, config(decode_path), [], str(tmp_path), None)
    async with no_leaks():
        ends = [await prefill.start(), await decode.start()]
        clients = [await connect(end) for end in ends]
        yield Rig(prefill._worker, decode._worker, *ends, *clients)  # type: ignore[arg-type]
        for client in clients:
            await client.close()
        await prefill.stop(1.0)
        await decode.stop(1.0)


async def served(rig: Rig, name: str) -> Run:
    run = rig.run(make_request(name, PROMPT_TOKENS, 5))
    await run.tokens()
    check_stream(run)
    return run


@pytest.mark.parametrize(
    ("prefill_path", "decode_path", "path"),
    [("auto", "auto", "shm"), ("shm", "auto", "shm"), ("auto", "tcp", "tcp"), ("tcp", "auto", "tcp")],
)
async def test_a_handoff_takes_the_best_path_that_both_sides_may_use_and_says_which(
    prefill_path: PathName, decode_path: PathName, path: str, tmp_path: Path
) -> None:
    async with actors(prefill_path, decode_path, tmp_path) as rig:
        run = await served(rig, "r1")
        assert run.committed is not None
        assert (run.committed.path, run.committed.num_blocks) == (path, 7)
        assert run.committed.num_bytes == 7 * rig.decode.shell.memory.block_bytes
        said = (await rig.status(rig.to_prefill)).kv_paths["decode-0"]
        is_ucx_left_out = prefill_path == "auto" and path == "tcp"  # over shm nobody asks why not in another way
        assert said.split("; ucx is not used: ")[0] == path
        assert ("ucx is not used" in said) == is_ucx_left_out
        assert (await rig.status(rig.to_decode)).kv_paths == {}


async def test_workers_that_may_use_no_path_in_common_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with actors("shm", "tcp", tmp_path) as rig:
        logging.getLogger().addHandler(caplog.handler)
        with pytest.raises(KvrelayError):
            await served(rig, "r1")
        assert "it offers tcp 127.0.0.1:" in caplog.text
        assert "we have shm" in caplog.text


async def test_a_handoff_whose_path_broke_half_way_goes_on_over_the_other_and_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with actors("auto", "auto", tmp_path) as rig:
        receiver = rig.decode._receiver  # type: ignore[attr-defined]
        seen = IncomingHandoff.on_receiver_event

        def cut_after_the_first(handoff: IncomingHandoff, event: msgspec.Struct) -> None:
            seen(handoff, event)  # type: ignore[arg-type]
            receiver._listeners[0].stop()

        monkeypatch.setattr(IncomingHandoff, "on_receiver_event", cut_after_the_first)
        run = await served(rig, "r1")
        assert run.committed is not None
        assert run.committed.path == "shm+tcp"
        assert (await served(rig, "r2")).committed.path == "tcp"  # type: ignore[union-attr]
        said = (await rig.status(rig.to_prefill)).kv_paths["decode-0"]
        assert said.startswith("tcp (shm failed, 1 in a row: @kvrelay-")
