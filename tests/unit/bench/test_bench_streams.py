"""What benches read out of streams: tokens and their moments, common decode steps, rounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from load_tests.completion_stream import CompletionStream, TokenArrival, moments_so_far, parse_stream, text_moments
from load_tests.fairness_bench import FairnessRounds, full_chunks_s
from load_tests.handoff_bench import HandoffSamples, exposed_ms, last_chunk
from load_tests.http_reply import Piece, Reply
from load_tests.mixed_bench import checks_of as mixed_checks
from load_tests.mixed_bench import measure_round
from load_tests.request_timeline import Chunk, Prefill, RequestTimeline, Transfer
from load_tests.serving_bench import common_steps
from load_tests.ttft_bench import checks_of as ttft_checks
from pd_core.errors import ProtocolError, Unavailable
from pd_core.layout import blocks_for


def choice(text: str, ids: list[int] | None = None, finish: str | None = None) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}]}


def reply(*events: dict[str, Any], is_done: bool = True, status: int = 200) -> Reply:
    """Event n at second n."""
    texts = [json.dumps(event).encode() for event in events] + ([b"[DONE]"] if is_done else [])
    return Reply(status, {}, b"".join(texts), [(float(number), text) for number, text in enumerate(texts)])


def stream_of(*moments: float, sent_s: float = 0.0) -> CompletionStream:
    return CompletionStream("cmpl-1", sent_s, [TokenArrival(7, at_s) for at_s in moments], "length", None)


def test_a_stream_s_tokens_come_when_their_events_do():
    usage = {"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 3}}
    stream = parse_stream(reply(choice("a", [1]), choice("", [2, 3]), choice("", None, "length"), usage), sent_s=-1.0)
    assert stream.request_id == "cmpl-1"
    assert (stream.tokens, stream.moments) == ([1, 2, 3], [0.0, 1.0, 1.0])
    assert (stream.ttft_s, stream.finish, stream.num_completion) == (1.0, "length", 3)


def test_events_with_text_are_counted_without_token_ids():
    assert text_moments(reply(choice("a"), choice(""), choice("b"), choice("", None, "stop"))) == [0.0, 2.0]


def test_a_stream_that_still_runs_shows_the_tokens_so_far():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    data = b"data: " + json.dumps(choice("a", [1])).encode() + b"\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(data), data)
    assert moments_so_far([Piece(1.0, head + chunk), Piece(2.0, chunk), Piece(3.0, chunk[:9])]) == [1.0, 2.0]
    end = b"e\r\ndata: [DONE]\n\n\r\n"
    assert moments_so_far([Piece(1.0, head + chunk), Piece(2.0, end + b"0\r\n\r\n")]) == [1.0]


def test_a_refusal_and_a_failure_on_the_way_are_raised_with_what_they_say():
    with pytest.raises(Unavailable, match="HTTP 503"):
        parse_stream(reply(status=503, is_done=False), 0.0)
    with pytest.raises(Unavailable, match="worker lost"):
        parse_stream(reply(choice("a", [1]), {"error": {"message": "worker lost"}}, is_done=False), 0.0)


def test_a_stream_without_its_end_or_its_reason_is_no_answer():
    with pytest.raises(ProtocolError, match="without its end"):
        parse_stream(reply(choice("a", [1]), is_done=False), 0.0)
    with pytest.raises(ProtocolError, match="finish reasons"):
        parse_stream(reply(choice("a", [1])), 0.0)
    with pytest.raises(ProtocolError, match="no chunk"):
        parse_stream(Reply(200, {}, b"", [(0.0, b"{"), (1.0, b"[DONE]")]), 0.0)


def test_common_steps_begin_when_the_last_stream_has_joined_and_end_with_the_first_to_end():
    step_s = 0.125
    early = stream_of(*(step_s * n for n in range(40)))
    late = stream_of(*(step_s * (10 + n) for n in range(60)))
    window = common_steps([early, late], num_prompt=100)
    # late's token 2 is the first that counts, when early has its token 12; early's last, 39, comes with late's 29
    assert window.num_steps == 27
    assert window.took_s == 27 * step_s
    assert window.starts == [100 + 12, 100 + 2]


def test_streams_that_hardly_met_give_no_figure():
    with pytest.raises(ProtocolError, match="steps in common"):
        common_steps([stream_of(*range(20)), stream_of(*range(18, 60))], num_prompt=10)


def test_what_the_cluster_adds_is_compared_pair_by_pair():
    pairs = [(0.110, 0.100), (0.230, 0.210), (0.308, 0.300)]
    added = {check.name: check for check in ttft_checks(64, pairs)}["ttft_64_added"]
    assert added.value == pytest.approx(10.0)
    assert added.spread == pytest.approx((8.4, 18.0))
    assert added.ok is True


def handoff(path: str, milliseconds: float, *chunks: tuple[int, int], num_bytes: int = 1) -> RequestTimeline:
    """chunks: their start and number of tokens"""
    prefill = Prefill([Chunk(start, num_tokens, 1.0) for start, num_tokens in chunks])
    return RequestTimeline(prefill, Transfer(path, num_bytes, milliseconds))


def test_an_exposed_handoff_counts_only_over_the_path_that_was_asked_for():
    assert exposed_ms(handoff("shm", 2.5), "shm") == 2.5
    for wrong in (handoff("tcp", 2.5), RequestTimeline()):
        with pytest.raises(ProtocolError):
            exposed_ms(wrong, "shm")


def test_each_path_batch_and_prompt_has_a_check_with_the_target_of_its_path():
    samples = HandoffSamples()
    for milliseconds in (4.0, 6.0, 5.0):
        samples.add("shm", 4, {64: handoff("shm", milliseconds)})
        samples.add("tcp", 4, {64: handoff("tcp", milliseconds)})
    checks = {check.name: (check.value, check.target, check.ok) for check in samples.checks()}
    assert checks == {"shm_exposed_64_batch_4": (5.0, 5.0, True), "tcp_exposed_64_batch_4": (5.0, 15.0, True)}


@pytest.mark.parametrize(("wire_ms", "beyond_ms"), [(2.0, -0.5), (1.0, 0.5)])
def test_the_exposed_handoff_may_be_half_the_wire_time_and_three_milliseconds_above_the_wire_time(wire_ms, beyond_ms):
    samples = HandoffSamples()
    for exposed, wire in ((5.5, wire_ms), (50.0, 31.0), (4.5, wire_ms)):
        samples.add("tcp", 0, {512: handoff("tcp", exposed), 64: handoff("tcp", 1.0)})
        samples.add("tcp", 4, {512: handoff("tcp", 99.0)})
        samples.add_wire({512: wire})
    checks = {check.name: check for check in samples.checks()}
    assert checks["tcp_wire_512"].value == wire_ms
    judged = checks["tcp_exposed_512_beyond_limit"]
    assert (judged.value, judged.target, judged.ok) == (beyond_ms, 0.0, beyond_ms <= 0)
    assert "tcp_wire_64" not in checks


@pytest.mark.parametrize(
    ("chunks", "num_blocks"),
    [([(0, 256), (256, 256)], 16), ([(0, 256), (256, 1)], 1), ([(3840, 160)], 10), ([(0, 17)], 2)],
)
def test_the_last_chunk_has_the_blocks_that_it_filled_and_no_others(chunks, num_blocks):
    num_all = blocks_for(sum(chunks[-1]))
    shape = last_chunk(handoff("tcp", 1.0, *chunks, num_bytes=num_all * 368_640))
    assert (shape.num_blocks, shape.block_bytes) == (num_blocks, 368_640)


def test_a_timeline_without_chunks_has_no_last_one():
    for wrong in (handoff("tcp", 1.0), RequestTimeline(), RequestTimeline(Prefill([Chunk(0, 16, 1.0)]))):
        with pytest.raises(ProtocolError):
            last_chunk(wrong)


def test_the_short_prompts_p99_may_be_two_chunks_above_that_alone():
    rounds = FairnessRounds(256)
    rounds.alone_s = [0.1] * 100
    rounds.beside_s = [0.1] * 97 + [0.9, 0.9, 0.9]
    rounds.long_s, rounds.chunks_s = [8.0], [0.3, 0.4, 0.5]
    checks = {check.name: check for check in rounds.checks()}
    assert checks["short_ttft_p99_beside_long"].target == pytest.approx(900.0)
    assert checks["short_ttft_p99_beside_long"].ok is True
    assert checks["short_ttft_p99_added"].value == pytest.approx(2.0)
    rounds.beside_s = [0.1] * 97 + [0.91] * 3
    assert {check.name: check.ok for check in rounds.checks()}["short_ttft_p99_beside_long"] is False


def test_only_full_chunks_of_a_long_prompt_count():
    chunks = [Chunk(0, 192, 90.0), Chunk(192, 256, 100.0), Chunk(448, 256, 300.0)]
    timeline = RequestTimeline(prefill=Prefill(chunks))
    assert full_chunks_s(timeline, 256) == [0.1, 0.3]
    with pytest.raises(ProtocolError, match="no chunk of 512"):
        full_chunks_s(timeline, 512)
    with pytest.raises(ProtocolError, match="no chunk of 256"):
        full_chunks_s(RequestTimeline(), 256)


def test_a_mixed_round_counts_what_came_while_the_long_prompts_were_there():
    long = stream_of(*([3.0] * 16), sent_s=1.0)
    one = measure_round([[0.5, 1.5, 2.0, 3.0, 9.0], [1.25, 1.75]], [long], began_s=1.0, ended_s=5.0)
    assert sorted(one.itl_s) == [0.5, 0.5, 1.0]
    assert one.ttft_s == [2.0]
    assert one.tokens_per_s == (5 + 2048 + 16) / 4.0
    checks = {check.name: check.value for check in mixed_checks("separate", [one])}
    assert checks["separate_itl_p50"] == 500.0
    assert checks["separate_itl_longest"] == 1000.0
