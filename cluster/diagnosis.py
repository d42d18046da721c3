"""What `kvrelay doctor` has found, and whether it is well. Pure."""

from __future__ import annotations

import enum

import msgspec

from cluster.handoff_tax import handoff_tax_s
from pd_core.transfer import ProbedPath

TAX_TOKENS = (1024, 8192, 32768)
ONE_HOST = "shm"
"""The path that there is only between workers of one host."""


class MachineFacts(msgspec.Struct, frozen=True):
    """cores: that this process may use; of num_cores that there are

    available_bytes: memory that can be had without swapping, in this container
    shm_bytes, shm_free_bytes: /dev/shm, which Ray's object store uses and KV does not; None where there is none
    huge_pages, shmem_huge_pages: the kernel's setting for ordinary and for shared memory; pools get theirs by
                     MADV_COLLAPSE whatever it is
    num_reserved_huge_pages: hugetlbfs; KV does not use it
    versions:        of packages; None for one that is not installed
    """

    host: str
    system: str
    python: str
    cpu: str
    cores: list[int]
    num_cores: int
    memory_bytes: int
    available_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    huge_pages: str
    shmem_huge_pages: str
    num_reserved_huge_pages: int
    versions: dict[str, str | None]


class Failure(msgspec.Struct, frozen=True):
    code: str | None
    message: str


class Head(msgspec.Struct, frozen=True, tag="paths", tag_field="object"):
    """First line of /debug/paths; see router.path_probes."""

    model: str
    transfer_path: str
    chunk_tokens: int
    max_request_tokens: int | None
    has_prefill_workers: bool
    num_blocks: int
    num_rounds: int
    num_pairs: int
    workers: list[dict[str, str]]


class Pair(msgspec.Struct, frozen=True, tag="pair", tag_field="object"):
    """One line for each pair of workers. hosts: where they listen; error: why it was not probed"""

    prefill: str
    decode: str
    hosts: list[str]
    prefill_tokens_per_s: float | None = None
    error: Failure | None = None
    paths: list[ProbedPath] = []
    in_use: str | None = None
    how: str = ""
    control_s: float | None = None
    block_bytes: int = 0

    @property
    def names(self) -> str:
        return f"from {self.prefill} to {self.decode}"


class Verdict(enum.Enum):
    """Whose value is the command's exit status."""

    WELL = 0
    UNKNOWN = 1  # no cluster was reached, or some of it could not be probed now
    WRONG_PATH = 3  # a pair has no path, not the one that was asked for, or a worse one than it could have


class Diagnosis(msgspec.Struct, frozen=True):
    """All that was found.

    head, pairs: of the cluster; None and empty when none was reached, and then
    unreached:   why; local: two processes of this host, probed instead
    """

    url: str
    machine: MachineFacts
    ucx: str
    head: Head | None = None
    pairs: list[Pair] = []
    unreached: str | None = None
    local: Pair | None = None


def problems(diagnosis: Diagnosis) -> list[tuple[Verdict, str]]:
    """What is not well, in sentences."""
    head = diagnosis.head
    if head is None:
        return [(Verdict.UNKNOWN, f"no cluster was reached: {diagnosis.unreached}")]
    found = [problem for pair in diagnosis.pairs for problem in _problems_of(pair, head.transfer_path)]
    if head.has_prefill_workers and not head.num_pairs:
        said = ", ".join(f"{worker['name']} is {worker['health']}" for worker in head.workers) or "there are no workers"
        found.append((Verdict.WRONG_PATH, f"no prefill and decode worker are ready together: {said}"))
    elif len(diagnosis.pairs) < head.num_pairs:
        found.append((Verdict.UNKNOWN, f"only {len(diagnosis.pairs)} of {head.num_pairs} pairs were probed"))
    return found


def verdict_of(found: list[tuple[Verdict, str]]) -> Verdict:
    """The worst of them."""
    return max((verdict for verdict, _ in found), key=lambda verdict: verdict.value, default=Verdict.WELL)


def _problems_of(pair: Pair, transfer_path: str) -> list[tuple[Verdict, str]]:
    if pair.error is not None:
        is_busy = pair.error.code == "overloaded"
        verdict = Verdict.UNKNOWN if is_busy else Verdict.WRONG_PATH
        return [(verdict, f"KV {pair.names} could not be probed: {pair.error.message}")]
    if pair.in_use is None:
        why = "; ".join(f"{path.path}: {path.reason}" for path in pair.paths if path.reason) or pair.how
        return [(Verdict.WRONG_PATH, f"KV {pair.names} has no path that works: {why}")]
    if transfer_path not in ("auto", pair.in_use):
        said = f"KV {pair.names} takes {pair.in_use}, while transfer.path asks for {transfer_path}"
        return [(Verdict.WRONG_PATH, said)]
    found = [
        (Verdict.WRONG_PATH, f"KV {pair.names} takes {pair.in_use} instead of {better.path}: {_why_not(pair, better)}")
        for better in better_paths(pair)
    ]
    used = next((path for path in pair.paths if path.path == pair.in_use), None)
    if used is not None and used.reason is not None:
        found.append((Verdict.WRONG_PATH, f"KV {pair.names} over {pair.in_use} broke under load: {used.reason}"))
    return found


def better_paths(pair: Pair) -> list[ProbedPath]:
    """Those before the one in use that these two workers should have; shared memory only on one host."""
    names = [path.path for path in pair.paths]
    if pair.in_use not in names:
        return []
    better = pair.paths[: names.index(pair.in_use)]
    is_one_host = len(set(pair.hosts)) == 1
    return [path for path in better if is_one_host or path.path != ONE_HOST]


def _why_not(pair: Pair, path: ProbedPath) -> str:
    return path.reason or f"it works again, and is tried again soon; {pair.how}"


def taxes_s(pair: Pair, chunk_tokens: int) -> dict[int, float]:
    """By prompt tokens, what the handoff adds over the path in use; none where it was not measured."""
    used = next((path for path in pair.paths if path.path == pair.in_use), None)
    if used is None or used.bytes_per_s is None or used.latency_s is None:
        return {}
    return {
        num_tokens: handoff_tax_s(
            num_tokens,
            chunk_tokens=chunk_tokens,
            block_bytes=pair.block_bytes,
            prefill_tokens_per_s=pair.prefill_tokens_per_s,
            bytes_per_s=used.bytes_per_s,
            latency_s=used.latency_s,
        )
        for num_tokens in TAX_TOKENS
    }
