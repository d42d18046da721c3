"""`kvrelay doctor`: asks a cluster's router to probe every pair of workers, or probes this host where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from cluster.diagnosis import Diagnosis, Failure, Head, MachineFacts, Pair
from cluster.local_probe import probe_this_host
from cluster.machine_facts import read_facts
from cluster.router_http import ask_router
from kv_transport.ucx_probe import probe_ucx
from kv_transport.ucx_settings import rdma_devices
from pd_core.errors import ConfigError, InvalidRequest, KvrelayError, TransferError, Unavailable

TARGET = "/debug/paths"
ANSWER_S = 3600.0
SILENCE_S = 75.0
"""A pair whose paths all hang takes a minute, and there may be many."""
REACH_S = 3.0
THIS_HOST = "127.0.0.1"

_Line = Head | Pair


class _Refusal(msgspec.Struct, frozen=True):
    error: Failure


def examine(url: str, num_blocks: int, num_rounds: int, on_progress: Callable[[str], None]) -> Diagnosis:
    """All that can be found out.

    Raises ConfigError when `url` is none or the pushes are too large, Unavailable when the router refuses.
    """
    unreached: str | None = None
    try:
        ask_router(url, "/health", deadline_s=REACH_S)
    except Unavailable as error:
        unreached = error.message
    facts = read_facts()
    on_progress("looking at UCX")
    found = Diagnosis(url, facts, describe_ucx())
    if unreached is not None:
        on_progress("no cluster is reached: probing this host")
        local = _probe_here(facts, num_blocks, num_rounds)
        return msgspec.structs.replace(found, unreached=unreached, local=local)
    head, pairs = _ask(url, num_blocks, num_rounds, on_progress)
    for pair in pairs:
        if pair.error is not None and pair.error.code == InvalidRequest.code:
            raise ConfigError(f"--blocks: {pair.error.message}", param="blocks")
    return msgspec.structs.replace(found, head=head, pairs=pairs)


def _ask(url: str, num_blocks: int, num_rounds: int, on_progress: Callable[[str], None]) -> tuple[Head, list[Pair]]:
    lines: list[bytes] = []

    def on_line(line: bytes) -> None:
        lines.append(line)
        on_progress(f"probing: {len(lines) - 1} pairs are done")

    order = msgspec.json.encode({"num_blocks": num_blocks, "num_rounds": num_rounds})
    reply = ask_router(url, TARGET, deadline_s=ANSWER_S, silence_s=SILENCE_S, post=order, on_line=on_line)
    if reply.status != 200:
        raise _refusal(url, reply.status, reply.body)
    try:
        read = [msgspec.json.decode(line, type=_Line) for line in lines]
    except msgspec.DecodeError as error:
        raise Unavailable(f"what answers on {url} is no kvrelay: {error}") from error
    pairs = [line for line in read[1:] if isinstance(line, Pair)]
    if not read or not isinstance(read[0], Head) or len(pairs) != len(read) - 1:
        raise Unavailable(f"what answers on {url} is no kvrelay: its {TARGET} begins with no head")
    return read[0], pairs


def _refusal(url: str, status: int, body: bytes) -> KvrelayError:
    try:
        refused = msgspec.json.decode(body, type=_Refusal)
    except msgspec.DecodeError:
        return Unavailable(f"what answers on {url} is no kvrelay that can be examined: {TARGET} gave status {status}")
    return Unavailable(f"{url} refuses to be examined: {refused.error.message}")


def _probe_here(facts: MachineFacts, num_blocks: int, num_rounds: int) -> Pair:
    nobody = Pair("one process", "another", [facts.host, facts.host])
    try:
        found = asyncio.run(probe_this_host(num_blocks, num_rounds, facts.cores))
    except InvalidRequest as error:
        raise ConfigError(f"--blocks: {error.message}", param="blocks") from error
    except KvrelayError as error:
        return msgspec.structs.replace(nobody, error=Failure(error.code, error.message))
    return msgspec.structs.replace(
        nobody,
        paths=found.paths,
        in_use=found.in_use,
        how=found.how,
        control_s=found.control_s,
        block_bytes=found.block_bytes,
    )


def describe_ucx() -> str:
    """What a probe of UCX on this host finds, or why it cannot be used. Takes seconds."""
    try:
        return probe_ucx(THIS_HOST, prefer_system=bool(rdma_devices())).describe()
    except TransferError as error:
        return error.message
