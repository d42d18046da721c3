"""With `tls` in the config nobody on the network can read what workers and router say, nor KV."""

from __future__ import annotations

from pathlib import Path

import msgspec
from host_network import HostNetwork
from host_serving import serving_on
from host_sniffer import listening_to
from host_workers import host_config
from tls_authority import Authority

PLACES = {"prefill-0": "prefill", "decode-0": "decode"}
CONTROL_MAGIC = b"KVRP"
BLOCKS_MAGIC = b"KVRB"
PROMPT = [11, 12, 13, 14] * 16
KV = bytes([(11 + 0) % 251]) * 8 + bytes([(12 + 1) % 251]) * 8
"""K of the prompt's first two tokens, as the fake engine makes it."""


async def test_without_tls_whoever_listens_reads_calls_and_kv(network: HostNetwork, tmp_path: Path) -> None:
    async with serving_on(network, tmp_path, host_config(), PLACES) as serving:
        with listening_to(network, "decode") as sniffer:
            assert (await serving.complete(PROMPT, 5)).status == 200
            heard = sniffer.heard()
    assert all(secret in heard for secret in (CONTROL_MAGIC, BLOCKS_MAGIC, KV))


async def test_with_tls_requests_are_served_and_whoever_listens_reads_neither(
    network: HostNetwork, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(host_config(), tls=Authority(tmp_path).issue())
    async with serving_on(network, tmp_path, config, PLACES) as serving:
        with listening_to(network, "decode") as sniffer:
            reply = await serving.complete(PROMPT, 5)
            assert reply.status == 200
            heard = sniffer.heard()
    assert len(heard) > 4 * 256  # the blocks went that way
    assert not any(secret in heard for secret in (CONTROL_MAGIC, BLOCKS_MAGIC, KV))
