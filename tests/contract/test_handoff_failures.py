"""When something breaks between the two workers: an error, never a hang; and every block comes back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import msgspec
import pytest
from waiting import until
from worker_rig import (
    CALL_S,
    CHUNK_TOKENS,
    HANDOFF_PATHS,
    LEASE_S,
    SHORT_LEASE_S,
    Rig,
    Run,
    Times,
    check_stream,
    failure_of,
    make_request,
    short_lease,
    small_config,
    workers,
)

from kv_transport.inproc_faults import FaultPlan
from pd_core.config import DecodeConfig, PrefillConfig
from pd_core.errors import (
    EngineError,
    KvrelayError,
    LayoutMismatch,
    LeaseExpired,
    Overloaded,
    ProtocolError,
    StaleTicket,
    TransferError,
    WorkerLost,
)
from pd_core.messages import (
    AbandonPrefill,
    AllSent,
    FinishPrefill,
    HandoffVerdict,
    LeaseHeld,
    RenewLease,
    StartDecode,
    TicketGranted,
)
from pd_core.ticket import FirstToken, Ticket

SLOW = Times(prefill_chunk_s=0.06, decode_step_s=0.02)
PROMPT = 3 * CHUNK_TOKENS + 5
PROMPT_BLOCKS = 7

PHASES: dict[str, Callable[[Rig, Run], bool]] = {
    "at once": lambda rig, run: True,
    "with the ticket": lambda rig, run: run.granted.is_set(),
    "in the first chunk": lambda rig, run: rig.prefill.num_running == 1,
    "while pushing": lambda rig, run: rig.decode.extra_counters()["kv_bytes_received_total"] > 0,
    "at the first token": lambda rig, run: bool(run.made),
    "at the commit": lambda rig, run: run.committed is not None,
    "while decoding": lambda rig, run: len(run.made) >= 4,
}


@pytest.mark.parametrize("path", HANDOFF_PATHS)
async def test_a_router_that_leaves_in_any_phase_gets_every_block_back_within_a_second(path: str) -> None:
    async with workers(path, times=SLOW) as rig:
        for number, holds in enumerate(PHASES.values()):
            run = rig.run(make_request(f"left-{number}", PROMPT, 100))
            tokens = asyncio.ensure_future(run.tokens())
            await until(lambda holds=holds, run=run: holds(rig, run), 5.0)  # type: ignore[misc]
            tokens.cancel()
            await asyncio.gather(tokens, return_exceptions=True)
            await rig.wait_idle(within_s=1.0)
            made = (await rig.status(rig.to_decode)).counters["decode_tokens_total"]
            await asyncio.sleep(0.05)
            assert (await rig.status(rig.to_decode)).counters["decode_tokens_total"] == made
        assert await rig.generate(make_request("after", PROMPT, 3))
        num_before = (await rig.status(rig.to_prefill)).counters["requests_cancelled_total"]
        num_after = (await rig.status(rig.to_decode)).counters["requests_cancelled_total"]
        assert 2 <= num_after <= 3  # at the commit and while decoding; the first token may be as late as the commit
        assert num_before + num_after >= 5  # and in the first chunk, while pushing, at the first token


@pytest.mark.parametrize("path", HANDOFF_PATHS)
async def test_routers_that_leave_at_random_moments_disturb_nobody_else(path: str) -> None:
    generator = random.Random(11)
    async with workers(path, times=Times(prefill_chunk_s=0.004, decode_step_s=0.002)) as rig:

        async def one(number: int, patience_s: float | None) -> None:
            run = rig.run(make_request(f"n{number}", generator.randrange(1, 70), generator.randrange(1, 25)))
            try:
                async with asyncio.timeout(patience_s):
                    await run.tokens()
            except TimeoutError:
                return
            check_stream(run)

        for first in range(0, 48, 6):
            patience = [None, None, *(generator.random() * 0.1 for _ in range(4))]
            await asyncio.gather(*(one(first + place, wait_s) for place, wait_s in enumerate(patience)))
        await rig.wait_idle(within_s=1.0)


async def test_a_writer_that_never_comes_costs_the_lease_and_no_more() -> None:
    async with (
        workers("tcp", short_lease()) as rig,
        rig.to_decode.stream(StartDecode(make_request("r", 40, 5), 1), CALL_S) as messages,
    ):
        began_s = asyncio.get_running_loop().time()
        assert isinstance(await anext(messages), TicketGranted)
        with pytest.raises(LeaseExpired, match=r"silent for 0\.3 s"):
            await anext(messages)
        assert SHORT_LEASE_S <= asyncio.get_running_loop().time() - began_s < SHORT_LEASE_S + 1.0
        await rig.wait_idle(within_s=1.0)


async def test_a_worker_that_was_kept_from_running_does_not_blame_the_writer() -> None:
    async with workers("tcp", short_lease()) as rig:
        leg, ticket = await _granted(rig, rig.run(make_request("t", 20, 5)))
        for _ in range(5):
            renewal = asyncio.ensure_future(rig.to_decode.call(RenewLease(ticket.ref), CALL_S))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(SHORT_LEASE_S * 2)  # noqa: ASYNC251 - the whole process stands still
            await renewal
            assert not leg.done()
        with pytest.raises(LeaseExpired):
            await leg


async def test_a_worker_that_is_always_late_ends_the_lease_of_a_silent_writer_all_the_same() -> None:
    lease_s, lag_s = 0.15, 0.03
    async with workers("tcp", short_lease(lease_s)) as rig:
        leg, _ = await _granted(rig, rig.run(make_request("t", 20, 5)))
        began_s = asyncio.get_running_loop().time()
        while not leg.done():
            time.sleep(lag_s)  # noqa: ASYNC251 - every timer is late by more than it may
            await asyncio.sleep(0)
            waited_s = asyncio.get_running_loop().time() - began_s
            assert waited_s < 2 * lease_s + 1.0, "the lease does not end"
        assert waited_s > lease_s
        with pytest.raises(LeaseExpired):
            await leg


async def test_a_prefill_worker_that_dies_half_way_leaves_no_block_behind() -> None:
    async with workers("tcp", times=SLOW) as rig:
        tokens = asyncio.ensure_future(rig.generate(make_request("dies", PROMPT, 50)))
        await until(lambda: rig.decode.extra_counters()["kv_bytes_received_total"] > 0, 5.0)
        await _kill(rig.prefill)
        with pytest.raises(KvrelayError):
            await tokens
        await until(lambda: rig.decode.shell.ledger.counts().is_idle, LEASE_S + 2.0)


async def test_a_prefill_worker_that_dies_after_the_commit_is_not_missed() -> None:
    async with workers("tcp", times=SLOW) as rig:
        run = rig.run(make_request("dies", PROMPT, 50))
        tokens = asyncio.ensure_future(run.tokens())
        await until(lambda: run.committed is not None, 5.0)
        await _kill(rig.prefill)
        await tokens
        check_stream(run)
        await until(lambda: rig.decode.shell.ledger.counts().is_idle, LEASE_S + 2.0)


async def test_a_writer_that_falls_silent_while_it_computes_loses_its_ticket() -> None:
    async with workers("inproc", short_lease(), times=Times(prefill_chunk_s=0.5)) as rig:
        run = rig.run(make_request("silent", 2 * CHUNK_TOKENS, 5))
        tokens = asyncio.ensure_future(run.tokens())
        await until(lambda: rig.prefill.num_running == 1, 2.0)
        await asyncio.sleep(0.02)  # the first renewal is out
        for task in rig.prefill._path.tasks._tasks:
            task.cancel()
        with pytest.raises(LeaseExpired):
            await tokens
        await rig.wait_idle()


async def test_a_decode_worker_that_dies_frees_the_prefill_worker() -> None:
    for phase in ("in the first chunk", "while pushing", "at the first token"):
        async with workers("tcp", times=SLOW) as rig:
            run = rig.run(make_request("dies", PROMPT, 50))
            tokens = asyncio.ensure_future(run.tokens())
            await until(lambda phase=phase, rig=rig, run=run: PHASES[phase](rig, run), 5.0)  # type: ignore[misc]
            await _kill(rig.decode)
            with pytest.raises(WorkerLost):
                await tokens
            await until(lambda rig=rig: rig.prefill.shell.ledger.counts().is_idle, LEASE_S + 2.0)  # type: ignore[misc]


async def test_a_damaged_wire_gives_the_right_tokens_or_an_error_and_leaks_nothing() -> None:
    num_right = num_corrupt = 0
    for seed in range(14):
        generator = random.Random(seed)
        rates = {kind: generator.choice([0.0, 0.1, 0.25]) for kind in ("delay", "cut", "corrupt", "duplicate")}
        rates |= {kind: generator.choice([0.0, 0.1]) for kind in ("reorder", "truncate")}
        faults = FaultPlan(generator, **rates, delay_s=0.03)
        async with workers("inproc", faults=faults) as rig:
            requests = [make_request(f"s{seed}-{n}", generator.randrange(1, 130), 6) for n in range(8)]
            failures = await asyncio.gather(*(failure_of(rig, request) for request in requests))
            assert all(failure is None or isinstance(failure, TransferError) for failure in failures), failures
            num_right += failures.count(None)
            await rig.wait_idle()
            counters = (await rig.status(rig.to_decode)).counters
            num_corrupt += int(counters["kv_blocks_corrupt_total"])
    assert num_right > 90
    assert num_corrupt > 10


async def test_a_wire_that_spoils_everything_ends_in_an_error_after_bounded_rounds() -> None:
    async with workers("inproc", faults=FaultPlan(random.Random(1), corrupt=1.0)) as rig:
        with pytest.raises(TransferError, match="3 more tries"):
            await rig.generate(make_request("hopeless", 20, 5))
        await rig.wait_idle(within_s=1.0)
        prefill, decode = await rig.status(rig.to_prefill), await rig.status(rig.to_decode)
        assert decode.counters["kv_blocks_corrupt_total"] == 4
        assert prefill.counters["handoffs_aborted_total"] == decode.counters["handoffs_aborted_total"] == 1


@pytest.mark.parametrize("path", HANDOFF_PATHS)
async def test_a_late_writer_cannot_touch_the_blocks_of_the_next_request(path: str) -> None:
    config = small_config(decode=DecodeConfig(num_blocks=PROMPT_BLOCKS, max_batch=4, max_reserved=4))
    generator = random.Random(3)
    faults = FaultPlan(generator, delay=0.5, reorder=0.3, duplicate=0.3, delay_s=0.06)
    async with workers(path, config, faults=faults, times=Times(prefill_chunk_s=0.005)) as rig:
        for number in range(25):
            left = rig.run(make_request(f"left-{number}", PROMPT, 3))
            tokens = asyncio.ensure_future(left.tokens())
            await asyncio.wait([tokens], timeout=generator.random() * 0.03)
            tokens.cancel()
            await asyncio.gather(tokens, return_exceptions=True)
            while (failure := await failure_of(rig, make_request(f"next-{number}", PROMPT, 3))) is not None:
                assert isinstance(failure, Overloaded | TransferError), failure
                await asyncio.sleep(0.005)
        await rig.wait_idle()
        if path == "inproc":
            assert (await rig.status(rig.to_decode)).counters["kv_frames_stale_total"] > 0


async def test_pools_that_keep_other_kv_refuse_each_other_and_name_both_values() -> None:
    async with workers("tcp", prefill_numerics="fake 2") as rig:
        with pytest.raises(LayoutMismatch, match="numerics") as caught:
            await rig.generate(make_request("mismatch", 20, 5))
        assert "fake 1" in caught.value.message
        assert "fake 2" in caught.value.message
        await rig.wait_idle()


async def test_kv_that_no_token_can_have_made_fails_its_request_and_no_other() -> None:
    async with workers("inproc", times=Times(decode_step_s=0.005)) as rig:
        victim, neighbour = rig.run(make_request("victim", 33, 100)), rig.run(make_request("neighbour", 40, 100))
        tokens = asyncio.ensure_future(victim.tokens())
        others = asyncio.ensure_future(neighbour.tokens())
        await until(lambda: len(victim.made) > 2 and len(neighbour.made) > 2, 2.0)
        assert victim.ticket is not None
        assert rig.decode.num_running == 2
        rig.decode.shell.memory.block(victim.ticket.block_ids[1])[5] ^= 0xFF
        with pytest.raises(EngineError, match="no token's"):
            await tokens
        assert not others.done()
        await others
        check_stream(neighbour)
        assert await failure_of(rig, make_request("next", 33, 5)) is None
        await rig.wait_idle(within_s=1.0)


async def _granted(rig: Rig, run: Run) -> tuple[asyncio.Task[None], Ticket]:
    """Opens the decode leg alone."""
    leg = asyncio.ensure_future(run._decode_leg())
    await run.granted.wait()
    assert run.ticket is not None
    return leg, run.ticket


async def test_words_about_a_ticket_that_is_not_ours_are_stale() -> None:
    async with workers("tcp") as rig:
        leg, ticket = await _granted(rig, rig.run(make_request("t", 20, 5)))
        await rig.to_decode.call(RenewLease(ticket.ref), CALL_S)
        for change in ({"ticket_id": "x"}, {"incarnation": "earlier"}, {"epoch": 99}, {"attempt": 7}):
            wrong = msgspec.structs.replace(ticket.ref, **change)
            finish = FinishPrefill(wrong, FirstToken(1, 0))
            for body in (RenewLease(wrong), finish, AllSent(wrong), AbandonPrefill(wrong, "no")):
                with pytest.raises(StaleTicket):
                    await rig.to_decode.call(body, CALL_S)
        leg.cancel()
        await rig.wait_idle(within_s=1.0)
        with pytest.raises(StaleTicket):
            await rig.to_decode.call(RenewLease(ticket.ref), CALL_S)


async def test_a_writer_that_gives_up_ends_the_decode_leg_with_its_reason() -> None:
    async with workers("tcp") as rig:
        leg, ticket = await _granted(rig, rig.run(make_request("t", 20, 5)))
        await rig.to_decode.call(AbandonPrefill(ticket.ref, "the engine broke"), CALL_S)
        with pytest.raises(TransferError, match="the engine broke"):
            await leg
        await rig.wait_idle(within_s=1.0)


@pytest.mark.parametrize("first", [FirstToken(1, 5), FirstToken(97, 0), FirstToken(-1, 0)])
async def test_a_first_token_that_the_request_cannot_have_is_refused(first: FirstToken) -> None:
    async with workers("tcp") as rig:
        leg, ticket = await _granted(rig, rig.run(make_request("t", 20, 5)))
        with pytest.raises(ProtocolError, match="index 0 was to come"):
            await rig.to_decode.call(FinishPrefill(ticket.ref, first), CALL_S)
        with pytest.raises(ProtocolError):
            await leg
        await rig.wait_idle(within_s=1.0)


async def test_blocks_that_were_never_sent_are_named_as_missing_soon_after_the_writer_says_that_all_is_sent() -> None:
    async with workers("tcp") as rig:
        leg, ticket = await _granted(rig, rig.run(make_request("t", 20, 5)))
        renewing = asyncio.ensure_future(_renew_for_ever(rig, ticket))
        finishing = asyncio.ensure_future(rig.to_decode.call(FinishPrefill(ticket.ref, FirstToken(1, 0)), CALL_S))
        await asyncio.sleep(0.5)
        assert not finishing.done(), "what is on its way is not missing, however long it takes"
        began_s = asyncio.get_running_loop().time()
        assert await rig.to_decode.call(AllSent(ticket.ref), CALL_S) == LeaseHeld()
        assert await finishing == HandoffVerdict([0, 1])
        assert 0.25 < asyncio.get_running_loop().time() - began_s < 1.0
        renewing.cancel()
        leg.cancel()
        await asyncio.gather(leg, renewing, return_exceptions=True)
        await rig.wait_idle(within_s=1.0)


async def test_the_word_that_all_is_sent_may_come_before_the_first_token_and_counts_for_one_verdict() -> None:
    async with workers("tcp") as rig:
        leg, ticket = await _granted(rig, rig.run(make_request("t", 20, 5)))
        renewing = asyncio.ensure_future(_renew_for_ever(rig, ticket))
        await rig.to_decode.call(AllSent(ticket.ref), CALL_S)
        finish = FinishPrefill(ticket.ref, FirstToken(1, 0))
        assert await rig.to_decode.call(finish, CALL_S) == HandoffVerdict([0, 1])
        again = asyncio.ensure_future(rig.to_decode.call(finish, CALL_S))
        await asyncio.sleep(0.5)
        assert not again.done(), "it was sent again since: the writer has not said that this is over"
        renewing.cancel()
        leg.cancel()
        await asyncio.gather(leg, renewing, again, return_exceptions=True)
        await rig.wait_idle(within_s=1.0)


async def test_blocks_that_came_wrong_are_named_at_once_and_waited_for_when_they_are_sent_again() -> None:
    async with workers("inproc") as rig:
        leg, ticket = await _granted(rig, rig.run(make_request("t", 20, 5)))
        renewing = asyncio.ensure_future(_renew_for_ever(rig, ticket))
        await rig.prefill._path.sender.push(ticket, [0, 1], [0, 1], [123, 456], CALL_S)
        took_s = []
        for _ in range(2):
            began_s = asyncio.get_running_loop().time()
            finishing = asyncio.ensure_future(rig.to_decode.call(FinishPrefill(ticket.ref, FirstToken(1, 0)), CALL_S))
            await rig.to_decode.call(AllSent(ticket.ref), CALL_S)
            assert await finishing == HandoffVerdict([0, 1])
            took_s.append(asyncio.get_running_loop().time() - began_s)
        assert took_s[0] < 0.2 < took_s[1]
        renewing.cancel()
        leg.cancel()
        await asyncio.gather(leg, renewing, return_exceptions=True)
        await rig.wait_idle(within_s=1.0)


async def _renew_for_ever(rig: Rig, ticket: Ticket) -> None:
    while True:
        await rig.to_decode.call(RenewLease(ticket.ref), CALL_S)
        await asyncio.sleep(LEASE_S / 3)


async def test_a_ticket_whose_range_the_prompt_does_not_have_is_refused_by_the_prefill_worker() -> None:
    config = small_config(prefill=PrefillConfig(num_blocks=8, chunk_tokens=CHUNK_TOKENS))
    async with workers("tcp", config) as rig:
        run = rig.run(make_request("t", 20, 5))
        leg, ticket = await _granted(rig, run)
        run.ticket = msgspec.structs.replace(ticket, first_block=1)
        with pytest.raises(TransferError, match="the prompt has 2"):
            await run._prefill_leg()
        leg.cancel()
        await rig.wait_idle(within_s=1.0)


async def _kill(worker: object) -> None:
    """As near to SIGKILL as one process allows: every connection is gone in the same moment, nothing is said."""
    shell = worker.shell  # type: ignore[attr-defined]
    for connection in list(shell._server._connections):
        connection.link.abort()
    path = getattr(worker, "_path", None)
    if path is not None:
        for client in path.control._clients.values():
            client._link.abort()
        for task in path.tasks._tasks:
            task.cancel()
    else:
        await worker._receiver.close()  # type: ignore[attr-defined]
        await shell._server.close()
