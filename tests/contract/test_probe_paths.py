"""A probe of the paths between two workers: what it finds, and that it leaves nothing and disturbs nobody."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest
from waiting import until
from worker_rig import CALL_S, Rig, Times, check_stream, make_request, short_lease, small_config, workers
from wrong_address import nobody_answers

from kv_transport import path_book
from kv_transport.choice import RoutedSender
from kv_transport.interface import PushReceipt
from kv_transport.ucx_library import is_installed
from kv_transport.ucx_offer import NOT_INSTALLED
from pd_core.config import DecodeConfig, PrefillConfig
from pd_core.errors import InvalidRequest, KvrelayError, LayoutMismatch, Overloaded, TransferError, Unavailable
from pd_core.messages import OpenProbe, PathsProbed, ProbePaths, WorkerEndpoint
from pd_engine.fake import FAKE_LAYOUT


async def probe(rig: Rig, peer: WorkerEndpoint | None = None, *, num_blocks: int = 8, num_rounds: int = 2) -> Any:
    body = ProbePaths(peer or rig.decode_end, num_blocks, num_rounds)
    found = await rig.to_prefill.call(body, CALL_S)
    assert isinstance(found, PathsProbed)
    return found


async def warmed(rig: Rig, name: str) -> None:
    run = rig.run(make_request(name, 40, 3))
    await run.tokens()
    check_stream(run)


UCX = pytest.param("ucx", marks=pytest.mark.skipif(not is_installed(), reason=NOT_INSTALLED))


@pytest.mark.parametrize("path", ["inproc", "tcp", "shm", UCX])
async def test_a_probe_says_how_fast_a_path_is_and_leaves_every_block_free(path: str) -> None:
    async with workers(path) as rig:
        found = await probe(rig)
        [only] = found.paths
        assert (only.path, only.reason, found.in_use, found.how) == (path, None, path, path)
        assert only.bytes_per_s > 0
        assert 0 < only.latency_s < CALL_S
        assert 0 < found.control_s < CALL_S
        assert (found.num_blocks, found.num_rounds, found.block_bytes) == (8, 2, FAKE_LAYOUT.block_bytes)
        assert rig.is_idle
        assert len(rig.prefill.shell.requests) == len(rig.decode.shell.requests) == 0


async def test_every_path_that_both_have_is_measured_by_itself_best_first() -> None:
    async with workers("auto") as rig:
        found = await probe(rig)
        assert [(path.path, path.reason) for path in found.paths] == [("shm", None), ("tcp", None)]
        assert all(path.bytes_per_s > 0 for path in found.paths)
        assert (found.in_use, found.how) == ("shm", "shm")


async def test_what_is_pushed_arrives_and_counts_as_nobodys_handoff() -> None:
    async with workers("tcp") as rig:
        await probe(rig, num_blocks=5, num_rounds=3)
        decode, prefill = await rig.status(rig.to_decode), await rig.status(rig.to_prefill)
        # one with the choice, one to connect, three of one block and three of five
        num_bytes = (1 + 1 + 3 + 3 * 5) * FAKE_LAYOUT.block_bytes
        assert decode.counters["kv_bytes_received_total"] == num_bytes
        assert decode.counters["handoffs_committed_total"] == decode.counters["handoffs_aborted_total"] == 0
        assert prefill.counters["handoffs_committed_total"] == prefill.counters["kv_bytes_sent_total"] == 0
        assert (prefill.transfers["tcp"].num_pushes, prefill.transfers["tcp"].num_bytes) == (8, num_bytes)


async def test_a_path_that_nobody_answers_is_named_with_its_reason_and_the_next_one_is_measured() -> None:
    async with workers("auto") as rig:
        nobody_answers(rig, "shm")
        found = await probe(rig)
        shm, tcp = found.paths
        assert "@kvrelay-nobody" in shm.reason
        assert (shm.bytes_per_s, shm.latency_s) == (None, None)
        assert tcp.reason is None
        assert tcp.bytes_per_s > 0
        assert found.in_use == "tcp"
        assert found.how.startswith("tcp (shm failed, 1 in a row: @kvrelay-nobody")
        assert rig.is_idle


async def test_where_no_path_works_each_says_why_and_nothing_is_in_use() -> None:
    async with workers("tcp") as rig:
        nobody_answers(rig, "tcp")
        found = await probe(rig)
        assert found.in_use is None
        assert "127.0.0.1:" in found.paths[0].reason
        await rig.wait_idle()


async def test_requests_go_on_beside_a_probe_with_the_right_tokens() -> None:
    async with workers("auto") as rig:
        runs = [rig.run(make_request(f"r{number}", 60, 40)) for number in range(4)]
        probing = asyncio.ensure_future(probe(rig, num_rounds=10))
        await asyncio.gather(*(run.tokens() for run in runs))
        for run in runs:
            check_stream(run)
            assert run.preempted == []
        assert all(path.reason is None for path in (await probing).paths)


async def test_a_pool_without_room_to_spare_refuses_a_probe_and_says_which() -> None:
    small = small_config(prefill=PrefillConfig(num_blocks=4, chunk_tokens=32))
    async with workers("tcp", small) as rig:
        with pytest.raises(Overloaded, match="8 blocks; 4 are free on the prefill worker"):
            await probe(rig)
        assert rig.is_idle
    small = small_config(decode=DecodeConfig(num_blocks=4))
    async with workers("tcp", small) as rig:
        with pytest.raises(Overloaded, match="8 blocks; 4 are free beside the growth"):
            await probe(rig)
        assert rig.is_idle


async def test_blocks_that_running_requests_are_about_to_need_are_none_to_spare() -> None:
    slow = Times(decode_step_s=0.05)
    async with workers("tcp", small_config(decode=DecodeConfig(num_blocks=8)), times=slow) as rig:
        run = rig.run(make_request("long", 49, 40))
        running = asyncio.ensure_future(run.tokens())
        await run.first_token.wait()
        await until(lambda: run.committed is not None)
        # of 8 blocks 4 hold the prompt and 2 are kept for its growth
        with pytest.raises(Overloaded, match="a probe needs 3 blocks; 2 are free"):
            await rig.to_decode.call(OpenProbe(3), CALL_S)
        running.cancel()


@pytest.mark.parametrize(
    ("num_blocks", "num_rounds", "param"),
    [(0, 1, "num_blocks"), (1 << 20, 1, "num_blocks"), (1, 0, "num_rounds"), (1, 101, "num_rounds")],
)
async def test_a_probe_of_nothing_or_of_too_much_is_refused_by_the_fields_name(
    num_blocks: int, num_rounds: int, param: str
) -> None:
    async with workers("inproc") as rig:
        with pytest.raises(InvalidRequest) as caught:
            await probe(rig, num_blocks=num_blocks, num_rounds=num_rounds)
        assert caught.value.param == param


async def test_one_probe_at_a_time_and_one_that_is_given_up_holds_nothing() -> None:
    async with workers("inproc") as rig:
        rig.prefill._sender = stalled = StalledSender()
        rig.prefill._prober._sender = stalled
        first = asyncio.ensure_future(probe(rig))
        await stalled.is_pushing.wait()
        with pytest.raises(Overloaded, match="another probe is under way"):
            await probe(rig)
        first.cancel()
        await until(lambda: rig.is_idle, 3.0)
        assert stalled.num_inside == 0


async def test_a_ticket_that_nobody_uses_is_free_again_after_its_lease() -> None:
    async with workers("tcp", short_lease()) as rig:
        await rig.to_decode.call(OpenProbe(8), CALL_S)
        assert rig.decode.shell.ledger.counts().reserved == 8
        await rig.wait_idle(2.3)


async def test_tickets_of_probes_are_bounded_and_a_worker_that_stops_gives_them_back() -> None:
    async with workers("tcp", short_lease(30.0)) as rig:
        for _ in range(4):
            await rig.to_decode.call(OpenProbe(1), CALL_S)
        with pytest.raises(Overloaded, match="4 pushes of probes are under way"):
            await rig.to_decode.call(OpenProbe(1), CALL_S)
        await rig.decode.shell.drain(0.01)
        await until(lambda: rig.is_idle, 1.0)
        with pytest.raises(Unavailable, match="draining"):
            await rig.to_decode.call(OpenProbe(1), CALL_S)


async def test_workers_that_keep_other_kv_are_not_probed_and_both_values_are_named() -> None:
    async with workers("tcp", prefill_numerics="another") as rig:
        with pytest.raises(LayoutMismatch, match=r"numerics: ours '.+', theirs '.+'"):
            await probe(rig)
        assert rig.is_idle


async def test_a_peer_that_is_not_there_and_one_that_is_mute_are_errors_within_the_deadline() -> None:
    async with workers("tcp") as rig:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            host, port = mute.getsockname()
            gone = msgspec.structs.replace(rig.decode_end, host=host, port=port)
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(KvrelayError, match=f"{host}:{port}"):
                await probe(rig, gone)
            assert asyncio.get_running_loop().time() - began_s < 6.0
        with pytest.raises(KvrelayError, match=f"{host}:{port}"):
            await probe(rig, gone)
        another_boot = msgspec.structs.replace(rig.decode_end, incarnation="another")
        with pytest.raises(KvrelayError, match="started again"):
            await probe(rig, another_boot)
        assert rig.is_idle


async def test_a_path_that_handoffs_have_left_is_found_well_again_and_they_take_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(path_book, "FIRST_RETRY_S", 30.0)
    async with workers("auto") as rig:
        back = nobody_answers(rig, "shm")
        await warmed(rig, "before")
        back()
        found = await probe(rig)
        assert (found.in_use, found.paths[0].reason) == ("tcp", None)  # a handoff would still have passed it over
        assert found.how.startswith("tcp (shm failed, ")
        run = rig.run(make_request("after", 40, 3))
        await run.tokens()
        assert run.committed is not None
        assert run.committed.path == "shm"


class StalledSender(RoutedSender):
    """Its pushes end by cancellation alone."""

    def __init__(self) -> None:
        super().__init__({})
        self.is_pushing = asyncio.Event()
        self.num_inside = 0

    async def push(self, *_: object) -> PushReceipt:
        self.num_inside += 1
        self.is_pushing.set()
        try:
            await asyncio.sleep(60.0)
        finally:
            self.num_inside -= 1
        raise TransferError("not reached")
