"""`kvrelay doctor` against clusters of real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, fake_cluster, slow_config
from kvrelay_process import KVRELAY

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(120)]

DOCTOR_S = 40.0


async def doctor(on: FakeCluster, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and what it says."""
    command = [str(KVRELAY), "doctor", "--json", "--url", str(on.http.base_url).rstrip("/"), *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(DOCTOR_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    said: dict[str, Any] = json.loads(output)
    return process.returncode, said


def in_use(said: dict[str, Any]) -> dict[str, str | None]:
    return {f"{pair['prefill']} {pair['decode']}": pair["in_use"] for pair in said["pairs"]}


async def test_every_pair_of_a_cluster_is_measured_while_it_serves(tmp_path: Path) -> None:
    config = slow_config(prefill={"num_blocks": 128, "num_workers": 2})
    async with fake_cluster(config, tmp_path) as on:
        asked = [asyncio.ensure_future(on.stream(f"question {number}", 100)) for number in range(6)]
        status, said = await doctor(on, "--blocks", "8", "--rounds", "3")
        assert all(outcome.is_done for outcome in await asyncio.gather(*asked))
        assert (status, said["problems"], said["reached"]) == (0, [], True)
        assert in_use(said) == {"prefill-0 decode-0": "shm", "prefill-1 decode-0": "shm"}
        for pair in said["pairs"]:
            paths = {path["path"]: path for path in pair["paths"]}
            assert all(paths[name]["bytes_per_s"] > 0 for name in ("shm", "tcp"))
        await on.ask("x" * 100, 2)
        _, said = await doctor(on, "--blocks", "1", "--rounds", "1")
        assert any(pair["prefill_tokens_per_s"] for pair in said["pairs"])
        assert all(pair["ttft_tax_ms"].keys() == {"1024", "8192", "32768"} for pair in said["pairs"])


async def test_a_path_that_went_silently_is_told_by_the_exit_status(tmp_path: Path) -> None:
    async with fake_cluster(slow_config(), tmp_path) as on:
        [decode] = [seat for seat in on.cluster._workers if seat.name == "decode-0"]
        await decode._actor.__ray_call__.remote(lambda actor: actor._worker._receiver._listeners[0].stop())
        assert (await on.ask("hello", 3)).status == 200  # nobody sees it in an answer
        status, said = await doctor(on)
        assert (status, in_use(said)) == (3, {"prefill-0 decode-0": "tcp"})
        assert "takes tcp instead of shm: @kvrelay-" in said["problems"][0]


async def test_the_configured_path_is_in_use_and_without_prefill_workers_there_is_none(tmp_path: Path) -> None:
    async with fake_cluster(slow_config(transfer={"path": "tcp"}), tmp_path) as on:
        status, said = await doctor(on)
        assert (status, in_use(said)) == (0, {"prefill-0 decode-0": "tcp"})
        assert [path["path"] for path in said["pairs"][0]["paths"]] == ["tcp"]
    async with fake_cluster(slow_config(prefill={"num_workers": 0}), tmp_path) as on:
        status, said = await doctor(on)
        assert (status, said["pairs"], said["cluster"]["has_prefill_workers"]) == (0, [], False)
