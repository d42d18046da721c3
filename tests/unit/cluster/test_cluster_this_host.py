"""What is found out about this host alone: facts of the machine, and the paths between two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from leaks import no_leaks

from cluster.local_probe import probe_this_host
from cluster.machine_facts import NOT_TOLD, read_facts
from pd_core.errors import InvalidRequest


async def test_a_probe_of_this_host_leaves_nothing_behind():
    machine_cores = read_facts().cores
    async with no_leaks():
        await probe_this_host(2, 1, machine_cores)
        with pytest.raises(InvalidRequest):
            await probe_this_host(4096, 1, machine_cores)


def test_what_a_kernel_does_not_say_is_said_to_be_unknown(tmp_path: Path):
    facts = read_facts(proc=tmp_path, sys=tmp_path, shared_memory=tmp_path / "none")
    assert (facts.huge_pages, facts.shmem_huge_pages) == (NOT_TOLD, NOT_TOLD)
    assert (facts.shm_bytes, facts.num_reserved_huge_pages) == (None, 0)
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\nHugePages_Total:      12\n")
    pages = tmp_path / "kernel" / "mm" / "transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always [madvise] never\n")
    facts = read_facts(proc=tmp_path, sys=tmp_path, shared_memory=tmp_path)
    assert (facts.huge_pages, facts.num_reserved_huge_pages) == ("madvise", 12)
    assert facts.shm_bytes is not None
