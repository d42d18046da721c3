"""What `kvrelay doctor` has found, as JSON and for people. Pure.

kvrelay on http://127.0.0.1:8000, model smollm2-135m-instruct, transfer.path auto; pushes of 16 blocks, 5 rounds

KV from prefill-0 to decode-0 takes shm
  path  in use   GB/s  latency ms
  shm   yes     4.120       0.410
  tcp           2.030       0.620
  a bare control call takes 0.130 ms
  the handoff adds 2.4 ms at 1k tokens, 2.4 ms at 8k, 2.4 ms at 32k (prefill at 5100 tokens/s)

all is well
"""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.diagnosis import Diagnosis, Head, Pair, better_paths, problems, taxes_s
from pd_core.transfer import ProbedPath

GIB, GIGA = float(1 << 30), 1e9


def as_json(diagnosis: Diagnosis) -> str:
    """One object in one line."""
    found = problems(diagnosis)
    pairs = [_pair_json(pair, diagnosis.head) for pair in diagnosis.pairs]
    known: dict[str, Any] = {
        "url": diagnosis.url,
        "reached": diagnosis.head is not None,
        "ok": not found,
        "problems": [sentence for _, sentence in found],
        "machine": msgspec.to_builtins(diagnosis.machine) | {"ucx": diagnosis.ucx},
        "cluster": None if diagnosis.head is None else msgspec.to_builtins(diagnosis.head),
        "pairs": pairs,
        "local": None if diagnosis.local is None else _pair_json(diagnosis.local, None),
    }
    return msgspec.json.encode(known).decode() + "\n"


def _pair_json(pair: Pair, head: Head | None) -> dict[str, Any]:
    known: dict[str, Any] = msgspec.to_builtins(pair)
    known["better_paths"] = [path.path for path in better_paths(pair)]
    if head is not None:
        taxes = taxes_s(pair, head.chunk_tokens)
        known["ttft_tax_ms"] = {str(tokens): round(tax_s * 1e3, 3) for tokens, tax_s in taxes.items()}
    return known


def render(diagnosis: Diagnosis) -> str:
    """For people: lines that end with a line feed."""
    lines = [_headline(diagnosis), *_machine(diagnosis)]
    for pair in diagnosis.pairs:
        lines += ["", *_pair(pair, diagnosis.head)]
    if diagnosis.local is not None:
        lines += ["", "two processes of this host instead:", *_pair(diagnosis.local, None)]
    found = problems(diagnosis)
    lines += ["", *(f"! {sentence}" for _, sentence in found)] if found else ["", "all is well"]
    return "\n".join(lines) + "\n"


def _headline(diagnosis: Diagnosis) -> str:
    head = diagnosis.head
    if head is None:
        return f"no kvrelay was reached on {diagnosis.url}"
    said = f"kvrelay on {diagnosis.url}, model {head.model}, transfer.path {head.transfer_path}"
    if not head.has_prefill_workers:
        return f"{said}; no prefill workers: decode workers compute prompts themselves, and no KV is handed on"
    return f"{said}; pushes of {head.num_blocks} blocks, {head.num_rounds} rounds"


def _machine(diagnosis: Diagnosis) -> list[str]:
    facts = diagnosis.machine
    shm = "there is no /dev/shm"
    if facts.shm_bytes is not None and facts.shm_free_bytes is not None:
        shm = f"/dev/shm {facts.shm_free_bytes / GIB:.1f} of {facts.shm_bytes / GIB:.1f} GiB free"  # noqa: S108 - a name
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version is not None)
    memory = f"{facts.available_bytes / GIB:.1f} of {facts.memory_bytes / GIB:.1f} GiB of memory can be had"
    return [
        f"this machine, {facts.host}: {len(facts.cores)} of {facts.num_cores} cores ({facts.cpu}), {memory}, {shm}",
        f"  huge pages: {facts.huge_pages}, of shared memory {facts.shmem_huge_pages}, "
        f"{facts.num_reserved_huge_pages} reserved",
        f"  {facts.system}, Python {facts.python}, {versions}",
        f"  UCX: {diagnosis.ucx.removeprefix('UCX ')}",
    ]


def _pair(pair: Pair, head: Head | None) -> list[str]:
    if pair.error is not None:
        return [f"KV {pair.names}: {pair.error.message}"]
    lines = [f"KV {pair.names} takes {pair.in_use or 'no path'}", *_path_table(pair)]
    if pair.control_s is not None:
        lines.append(f"  a bare control call takes {pair.control_s * 1e3:.3f} ms")
    if pair.how not in ("", pair.in_use):
        lines.append(f"  as handoffs have it: {pair.how}")
    taxes = {} if head is None else taxes_s(pair, head.chunk_tokens)
    if taxes and head is not None:
        said = ", ".join(f"{tax_s * 1e3:.1f} ms at {tokens // 1024}k tokens" for tokens, tax_s in taxes.items())
        lines.append(f"  the handoff adds {said} ({_prefill_rate(pair)})")
        limit = head.max_request_tokens
        if limit is not None and limit < max(taxes):
            lines.append(f"  a request may have {limit} tokens here; beyond that it is what the figures would give")
    return lines


def _prefill_rate(pair: Pair) -> str:
    if pair.prefill_tokens_per_s is None:
        return "how fast prefill is nobody has seen yet: as if the path kept up with it"
    return f"prefill at {pair.prefill_tokens_per_s:.0f} tokens/s"


def _path_table(pair: Pair) -> list[str]:
    heads = ["path", "in use", "GB/s", "latency ms", "why not"]
    rows = [heads, *(_row(pair, path) for path in pair.paths)]
    if not any(row[4] for row in rows[1:]):
        rows = [row[:4] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(_cell(row, column, widths) for column in range(len(row))).rstrip() for row in rows]


def _cell(row: list[str], column: int, widths: list[int]) -> str:
    return row[column].rjust(widths[column]) if column in (2, 3) else row[column].ljust(widths[column])


def _row(pair: Pair, path: ProbedPath) -> list[str]:
    return [
        path.path,
        "yes" if path.path == pair.in_use else "",
        "" if path.bytes_per_s is None else f"{path.bytes_per_s / GIGA:.3f}",
        "" if path.latency_s is None else f"{path.latency_s * 1e3:.3f}",
        path.reason or "",
    ]
