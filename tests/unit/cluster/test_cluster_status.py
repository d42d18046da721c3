"""`kvrelay status`: the map as text, and who answers what."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cluster.commands import kvrelay
from cluster.status import (
    BAR_CELLS,
    BAR_MARKS,
    ClusterStatus,
    Mismatch,
    Throughput,
    Worker,
    bar,
    parse_status,
    read_status,
    render,
)
from pd_core.errors import ConfigError, Unavailable

URL = "http://127.0.0.1:8000"
BLOCKS = {"total": 1024, "free": 874, "reserved": 0, "held": 150, "quarantined": 0}
PREFILL = Worker(
    "prefill-0",
    "prefill",
    "ready",
    0.2,
    pid=60211,
    num_running=1,
    num_waiting=0,
    blocks=BLOCKS,
    kv_paths={"decode-1": "tcp (shm failed, 2 in a row: nobody listens)", "decode-0": "shm"},
)


def test_the_map_shows_workers_load_and_pools():
    decode = Worker(
        "decode-0", "decode", "suspect", 2.31, pid=7, num_running=12, num_waiting=3, blocks=BLOCKS | {"reserved": 40}
    )
    status = ClusterStatus(
        ready=True,
        reason=None,
        running=3,
        waiting=1,
        workers=[PREFILL, decode],
        max_request_tokens=8176,
        max_queue=64,
        throughput=Throughput(window_s=10.0, prompt_tokens_per_s=310.04, generated_tokens_per_s=41.5),
    )
    assert render(URL, status).splitlines() == [
        "kvrelay on http://127.0.0.1:8000 is ready",
        "requests: 3 running, 1 waiting of at most 64; a request may have 8176 tokens",
        "tokens/s: 41.5 generated, 310.0 prompt, over the last 10 s",
        "",
        "worker     pid    health                 running  waiting  blocks",
        "prefill-0  60211  ready                        1        0  [###.................]  held 150, free 874 of 1024",
        "decode-0   7      suspect, silent 2.3 s       12        3  [###=................]"
        "  reserved 40, held 150, free 874 of 1024",
        "",
        "KV from prefill-0 to decode-0: shm",
        "KV from prefill-0 to decode-1: tcp (shm failed, 2 in a row: nobody listens)",
    ]


def test_workers_that_can_hand_nothing_over_are_named_with_what_differs():
    mismatch = Mismatch("prefill-0", "decode-0", "numerics: ours 'a', theirs 'b'")
    status = ClusterStatus(False, "no pair", running=0, waiting=0, workers=[PREFILL], kv_mismatches=[mismatch])
    assert render(URL, status).splitlines()[-1] == "no KV from prefill-0 to decode-0: numerics: ours 'a', theirs 'b'"


def test_what_is_not_known_is_left_out_and_a_cluster_that_is_not_ready_says_why():
    status = ClusterStatus(ready=False, reason="no decode worker", running=0, waiting=0, workers=[])
    assert render(URL, status).splitlines() == [
        "kvrelay on http://127.0.0.1:8000 is not ready: no decode worker",
        "requests: 0 running, 0 waiting",
        "",
        "no workers",
    ]
    unheard = Worker("decode-0", "decode", "starting", 0.0)
    assert render(URL, ClusterStatus(False, None, 0, 0, [unheard])).splitlines()[-2:] == [
        "worker    health",
        "decode-0  starting, silent 0.0 s",
    ]


@given(st.fixed_dictionaries({state: st.integers(0, 10_000) for state in BAR_MARKS}).filter(lambda x: any(x.values())))
def test_a_bar_shows_every_state_there_is_in_proportion_and_is_as_long_as_ever(counts):
    drawn = bar(counts)[1:-1]
    assert len(drawn) == BAR_CELLS
    for state, mark in BAR_MARKS.items():
        share = counts[state] * BAR_CELLS / sum(counts.values())
        assert (mark in drawn) == (counts[state] > 0)
        assert share - len(BAR_MARKS) < drawn.count(mark) < share + len(BAR_MARKS)


def test_a_full_pool_is_a_full_bar_and_an_idle_one_an_empty_one():
    assert bar({"total": 3, "held": 3, "free": 0}) == f"[{'#' * BAR_CELLS}]"
    assert bar({"total": 3, "held": 0, "free": 3}) == f"[{'.' * BAR_CELLS}]"
    assert bar({"total": 4, "held": 2, "reserved": 1, "free": 1}) == "[##########=====.....]"


@pytest.fixture
def serve() -> Iterator[Callable[[bytes | None], str]]:
    """A peer that says `reply` to one caller, or nothing at all (None), and where it listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()
    threads: list[threading.Thread] = []

    def answer(reply: bytes | None) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            if reply is None:
                over.wait(20.0)
            else:
                connection.sendall(reply)

    def begin(reply: bytes | None) -> str:
        threads.append(threading.Thread(target=answer, args=(reply,)))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield begin
    over.set()
    for thread in threads:
        thread.join()
    listener.close()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


READY = {"ready": True, "reason": None, "running": 0, "waiting": 0, "workers": [], "more": [1]}


def test_a_cluster_that_is_not_ready_answers_too_and_the_status_is_1(serve):
    body = json.dumps(READY | {"ready": False, "reason": "no worker of role decode"}).encode()
    result = CliRunner().invoke(kvrelay, ["status", "--url", serve(http(body, "503 Service Unavailable"))])
    assert result.exit_code == 1
    assert "is not ready: no worker of role decode" in result.stdout


def test_with_json_everything_that_the_router_says_is_one_line(serve):
    url = serve(http(json.dumps(READY).encode()))
    result = CliRunner().invoke(kvrelay, ["status", "--url", url, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"url": url} | READY
    assert result.stdout.count("\n") == 1


def test_nobody_there_is_one_sentence_and_status_1():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = CliRunner().invoke(kvrelay, ["status", "--url", url])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvrelay: no kvrelay answers on {url}: ")
    assert result.stderr.count("\n") == 1


def test_a_mute_peer_is_given_up_at_the_deadline(serve):
    url = serve(None)
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match=rf"{url} gave no answer within 0\.2 s"):
        read_status(url, deadline_s=0.2)
    assert time.monotonic() - began_s < 3.0


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"220 mail.example ESMTP\r\n",
        http(b"<html>hello</html>"),
        http(b"[]"),
        http(b'{"ready": true}'),
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}",
        http(b"x" * (5 << 20)),
    ],
)
def test_whoever_is_no_kvrelay_is_told_apart(serve, reply):
    url = serve(reply)
    with pytest.raises(Unavailable, match=r"no kvrelay|does not speak HTTP|longer than"):
        parse_status(url, read_status(url))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "https://127.0.0.1",
        "http://",
        "http://127.0.0.1:port",
        "http://[::1",
        f"http://{'x' * 70}",
    ],
)
def test_an_url_that_is_none_ends_with_status_2(url):
    with pytest.raises(ConfigError):
        read_status(url)
    assert CliRunner().invoke(kvrelay, ["status", "--url", url]).exit_code == 2
