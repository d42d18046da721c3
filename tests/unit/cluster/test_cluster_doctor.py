"""`kvrelay doctor`: what is well and what is not, as text, JSON and exit status; the command against stand-ins."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from click.testing import CliRunner

from cluster import doctor
from cluster.commands import kvrelay
from cluster.diagnosis import Diagnosis, Failure, Head, MachineFacts, Pair, Verdict, problems, taxes_s, verdict_of
from cluster.doctor_report import as_json, render
from kv_transport.ucx_offer import UcxReport
from pd_core.errors import TransferError
from pd_core.transfer import ProbedPath

URL = "http://127.0.0.1:8000"
FACTS = MachineFacts(
    host="box",
    system="Linux 6.1",
    python="3.11.7",
    cpu="EPYC",
    cores=[0, 1],
    num_cores=4,
    memory_bytes=16 << 30,
    available_bytes=12 << 30,
    shm_bytes=8 << 30,
    shm_free_bytes=7 << 30,
    huge_pages="madvise",
    shmem_huge_pages="never",
    num_reserved_huge_pages=0,
    versions={"kvrelay": "0.1.0", "torch": None},
)
HEAD = Head(
    model="smollm2",
    transfer_path="auto",
    chunk_tokens=256,
    max_request_tokens=8176,
    has_prefill_workers=True,
    num_blocks=16,
    num_rounds=5,
    num_pairs=1,
    workers=[{"name": "prefill-0", "role": "prefill", "health": "ready"}],
)
SHM = ProbedPath("shm", bytes_per_s=4e9, latency_s=0.0004)
TCP = ProbedPath("tcp", bytes_per_s=2e9, latency_s=0.0006)
NO_SHM = ProbedPath("shm", reason="@kvrelay-x: nobody listens")
PAIR = Pair(
    "prefill-0",
    "decode-0",
    ["127.0.0.1", "127.0.0.1"],
    prefill_tokens_per_s=5000.0,
    paths=[SHM, TCP],
    in_use="shm",
    how="shm",
    control_s=0.00013,
    block_bytes=368_640,
)


@pytest.fixture(autouse=True)
def ucx(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the probe of UCX does, which takes seconds and has tests of its own: an error to raise, or a report."""
    does: list[object] = [TransferError("UCX crashed")]

    def probe(host: str, *, prefer_system: bool) -> object:
        if isinstance(does[0], Exception):
            raise does[0]
        return does[0]

    monkeypatch.setattr(doctor, "probe_ucx", probe)
    return does


def changed(pair: Pair = PAIR, **fields: object) -> Pair:
    return msgspec.structs.replace(pair, **fields)


def found(*pairs: Pair, **head: object) -> Diagnosis:
    known = msgspec.structs.replace(HEAD, num_pairs=len(pairs), **head)
    return Diagnosis(URL, FACTS, "not here", known, list(pairs))


def judged(diagnosis: Diagnosis) -> tuple[Verdict, list[str]]:
    said = problems(diagnosis)
    return verdict_of(said), [sentence for _, sentence in said]


def test_a_pair_that_takes_its_best_path_is_well_and_shown_with_what_it_costs():
    assert judged(found(PAIR)) == (Verdict.WELL, [])
    assert render(found(PAIR)).splitlines() == [
        "kvrelay on http://127.0.0.1:8000, model smollm2, transfer.path auto; pushes of 16 blocks, 5 rounds",
        "this machine, box: 2 of 4 cores (EPYC), 12.0 of 16.0 GiB of memory can be had, /dev/shm 7.0 of 8.0 GiB free",
        "  huge pages: madvise, of shared memory never, 0 reserved",
        "  Linux 6.1, Python 3.11.7, kvrelay 0.1.0",
        "  UCX: not here",
        "",
        "KV from prefill-0 to decode-0 takes shm",
        "  path  in use   GB/s  latency ms",
        "  shm   yes     4.000       0.400",
        "  tcp           2.000       0.600",
        "  a bare control call takes 0.130 ms",
        "  the handoff adds 1.9 ms at 1k tokens, 1.9 ms at 8k tokens, 1.9 ms at 32k tokens (prefill at 5000 tokens/s)",
        "  a request may have 8176 tokens here; beyond that it is what the figures would give",
        "",
        "all is well",
    ]


def test_the_cost_is_that_of_the_path_in_use_and_without_a_prefill_rate_it_says_so():
    assert taxes_s(PAIR, 256)[1024] == pytest.approx(16 * 368_640 / 4e9 + 0.0004)
    over_tcp = changed(in_use="tcp", prefill_tokens_per_s=None)
    assert taxes_s(over_tcp, 256)[32768] == pytest.approx(16 * 368_640 / 2e9 + 0.0006)
    assert "nobody has seen yet: as if the path kept up" in render(found(over_tcp))
    slow = changed(paths=[ProbedPath("shm", bytes_per_s=1e8, latency_s=0.0)])
    assert taxes_s(slow, 256)[8192] > 10 * taxes_s(slow, 256)[1024] / 8
    assert taxes_s(changed(in_use=None), 256) == {}


def test_a_worse_path_than_there_could_be_is_a_fault_and_why_is_said():
    left = changed(paths=[NO_SHM, TCP], in_use="tcp", how="tcp (shm failed, 3 in a row: nobody listens)")
    verdict, [said] = judged(found(left))
    assert (verdict, said) == (
        Verdict.WRONG_PATH,
        "KV from prefill-0 to decode-0 takes tcp instead of shm: @kvrelay-x: nobody listens",
    )
    assert "  shm                              @kvrelay-x: nobody listens" in render(found(left)).splitlines()
    assert "  as handoffs have it: tcp (shm failed, 3 in a row: nobody listens)" in render(found(left))
    well_again = changed(in_use="tcp", how="tcp (shm failed, 3 in a row: nobody listens)")
    assert "it works again, and is tried again soon; tcp (shm failed, 3" in judged(found(well_again))[1][0]


def test_shared_memory_is_missed_on_one_host_alone():
    across = changed(paths=[NO_SHM, TCP], in_use="tcp", hosts=["10.0.0.1", "10.0.0.2"])
    assert judged(found(across)) == (Verdict.WELL, [])
    with_ucx = changed(across, paths=[NO_SHM, ProbedPath("ucx", reason="no device"), TCP])
    assert judged(found(with_ucx))[0] is Verdict.WRONG_PATH


def test_a_path_that_was_asked_for_and_is_not_in_use_is_a_fault():
    assert judged(found(PAIR, transfer_path="shm")) == (Verdict.WELL, [])
    verdict, [said] = judged(found(PAIR, transfer_path="tcp"))
    assert (verdict, said) == (
        Verdict.WRONG_PATH,
        "KV from prefill-0 to decode-0 takes shm, while transfer.path asks for tcp",
    )


def test_a_pair_without_any_path_says_what_is_wrong_with_each():
    none = changed(paths=[NO_SHM, ProbedPath("tcp", reason="127.0.0.1:1: refused")], in_use=None, how="")
    verdict, [said] = judged(found(none))
    assert verdict is Verdict.WRONG_PATH
    assert said.endswith("has no path that works: shm: @kvrelay-x: nobody listens; tcp: 127.0.0.1:1: refused")
    assert "takes no path" in render(found(none))


def test_a_path_that_breaks_under_load_although_one_block_got_through_is_a_fault():
    breaks = changed(paths=[ProbedPath("shm", reason="cut off"), TCP])
    assert judged(found(breaks)) == (
        Verdict.WRONG_PATH,
        ["KV from prefill-0 to decode-0 over shm broke under load: cut off"],
    )


def test_a_pair_that_is_busy_is_not_known_and_one_that_does_not_fit_is_wrong():
    busy = Pair("prefill-0", "decode-0", ["h", "h"], error=Failure("overloaded", "2 blocks are free"))
    assert judged(found(busy))[0] is Verdict.UNKNOWN
    other = changed(busy, error=Failure("layout_mismatch", "numerics: ours 'a', theirs 'b'"))
    assert judged(found(busy, other))[0] is Verdict.WRONG_PATH
    assert "KV from prefill-0 to decode-0: numerics: ours 'a', theirs 'b'" in render(found(busy, other)).splitlines()


def test_without_prefill_workers_there_are_no_pairs_and_that_is_well():
    alone = found(has_prefill_workers=False)
    assert judged(alone) == (Verdict.WELL, [])
    assert "no prefill workers: decode workers compute prompts themselves, and no KV is handed on" in render(alone)


def test_workers_that_are_not_ready_are_named_and_pairs_that_are_missing_are_counted():
    workers = [{"name": "prefill-0", "role": "prefill", "health": "dead"}]
    assert judged(found(workers=workers)) == (
        Verdict.WRONG_PATH,
        ["no prefill and decode worker are ready together: prefill-0 is dead"],
    )
    some = msgspec.structs.replace(found(PAIR), head=msgspec.structs.replace(HEAD, num_pairs=2))
    assert judged(some) == (Verdict.UNKNOWN, ["only 1 of 2 pairs were probed"])


def test_as_json_it_is_one_object_with_everything():
    said = as_json(found(PAIR))
    assert said.count("\n") == 1
    known = json.loads(said)
    assert (known["ok"], known["reached"], known["problems"]) == (True, True, [])
    assert known["machine"]["huge_pages"] == "madvise"
    assert known["cluster"]["model"] == "smollm2"
    [pair] = known["pairs"]
    assert (pair["in_use"], pair["better_paths"]) == ("shm", [])
    assert pair["paths"][1] == {"path": "tcp", "reason": None, "bytes_per_s": 2e9, "latency_s": 0.0006}
    assert pair["ttft_tax_ms"] == {"1024": 1.875, "8192": 1.875, "32768": 1.875}


# the command


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Answers one connection after the other with these bytes, and where it listens. What was asked is kept."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20.0)
    threads: list[threading.Thread] = []

    def answer(replies: tuple[bytes, ...]) -> None:
        for reply in replies:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

    def begin(*replies: bytes) -> str:
        threads.append(threading.Thread(target=answer, args=(replies,)))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield begin
    for thread in threads:
        thread.join()
    listener.close()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


ALIVE = http(b'{"status": "alive"}')


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*lines: bytes) -> bytes:
    chunks = [f"{len(line):x}\r\n".encode() + line + b"\r\n" for line in lines]
    return CHUNKED + b"".join(chunks) + b"0\r\n\r\n"


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def run(*arguments: str):
    return CliRunner().invoke(kvrelay, ["doctor", *arguments])


def test_a_cluster_that_is_well_ends_with_status_0(serve):
    whole = line(HEAD) + line(PAIR)
    result = run("--url", serve(ALIVE, chunked(whole[:10], whole[10:300], whole[300:])))
    assert result.exit_code == 0, result.output
    assert "all is well" in result.stdout
    assert "probing: 1 pairs are done" in result.stderr


def test_a_fall_back_ends_with_status_3_and_json_is_one_line_without_progress(serve):
    fallen = changed(paths=[NO_SHM, TCP], in_use="tcp")
    result = run("--json", "--url", serve(ALIVE, chunked(line(HEAD), line(fallen))))
    assert result.exit_code == 3
    assert result.stderr == ""
    assert json.loads(result.stdout)["problems"] == [
        "KV from prefill-0 to decode-0 takes tcp instead of shm: @kvrelay-x: nobody listens"
    ]


def test_pushes_that_are_too_large_for_the_workers_are_the_callers_fault_and_name_the_flag(serve):
    refused = Pair("p", "d", ["h", "h"], error=Failure("invalid_value", "num_blocks is 999; it must be at most 182"))
    result = run("--json", "--url", serve(ALIVE, chunked(line(HEAD), line(refused))))
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "event": "error",
        "code": "config_error",
        "message": "--blocks: num_blocks is 999; it must be at most 182",
        "param": "blocks",
    }


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (http(b'{"error": {"message": "loopback only", "code": "forbidden"}}', "403 Forbidden"), "loopback only"),
        (http(b"nothing here", "404 Not Found"), "no kvrelay that can be examined: /debug/paths gave status 404"),
        (http(b""), "begins with no head"),
        (chunked(b'{"object": "pair"}\n'), "is no kvrelay"),
        (chunked(line(PAIR)), "begins with no head"),
        (chunked(b"[]\n"), "is no kvrelay"),
        (CHUNKED + b"5\r\nab", "closed before the answer was complete"),
    ],
)
def test_whoever_refuses_or_is_no_kvrelay_is_one_sentence_and_status_1(serve, reply, said):
    result = run("--url", serve(ALIVE, reply))
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def test_a_router_that_falls_silent_in_the_middle_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "SILENCE_S", 0.2)
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in (ALIVE, CHUNKED):
                connection, _ = listener.accept()
                connections.append(connection)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        result = run("--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    for connection in connections:
        connection.close()
    assert result.exit_code == 1
    assert "has said nothing for 0.2 s" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--blocks", "0"], ["--rounds", "x"], ["--url", "nonsense"], ["--rounds", "101"]]
)
def test_a_command_that_is_wrong_names_the_flag_and_ends_with_status_2(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


# this host


def test_ucx_is_told_as_its_probe_finds_it(ucx):
    assert doctor.describe_ucx() == "UCX crashed"
    figures = {"gb_per_s": 1.5, "tcp_gb_per_s": 2.5, "latency_s": 2e-5}
    ucx[0] = UcxReport(
        version="1.19", library="wheel", library_file="x", transports=["tcp/lo"], has_cuda=False, **figures
    )
    assert doctor.describe_ucx().startswith("UCX 1.19 (wheel, without CUDA) over tcp/lo: 1.50 GB/s")


def test_where_no_cluster_is_reached_this_host_is_probed_and_the_status_is_1():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = run("--url", f"http://127.0.0.1:{unused.getsockname()[1]}", "--json", "--rounds", "1", "--blocks", "2")
    assert result.exit_code == 1
    known = json.loads(result.stdout)
    assert known["reached"] is False
    assert known["problems"][0].startswith("no cluster was reached: no kvrelay answers on ")
    assert known["machine"]["cores"]
    paths = {path["path"]: path for path in known["local"]["paths"]}
    assert {"shm", "tcp"} <= paths.keys()
    for name in ("shm", "tcp"):
        assert paths[name]["reason"] is None
        assert paths[name]["bytes_per_s"] > 0
    assert known["local"]["in_use"] == "shm"


async def test_a_second_process_that_dies_at_once_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr("cluster.local_probe.PROGRAM", "cluster.nothing_here")
    pair = await asyncio.to_thread(doctor._probe_here, FACTS, 2, 1)
    assert pair.error is not None
    assert "ended instead of answering" in pair.error.message or "was gone" in pair.error.message
