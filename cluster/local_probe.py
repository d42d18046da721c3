"""Probes the paths between two processes of this host, as a cluster's workers are probed: for where no cluster runs."""

from __future__ import annotations

import secrets

import msgspec

from cluster.local_probe_process import FINGERPRINT, LAYOUT, Begin
from kv_transport.paths import make_sender
from load_tests.child_process import child_process
from pd_core.config import TransferConfig
from pd_core.errors import KvrelayError
from pd_core.ledger import BlockLedger
from pd_core.messages import PathsProbed, WorkerEndpoint
from pd_rpc.wire import PeerIdentity
from pd_worker.control import ControlConnections
from pd_worker.memory import PoolMemory
from pd_worker.open_requests import OpenRequests
from pd_worker.outgoing_blocks import DirectBlocks
from pd_worker.path_probe import PathProber
from pd_worker.shell import check_peer

PROGRAM = "cluster.local_probe_process"
START_S = 20.0


async def probe_this_host(num_blocks: int, num_rounds: int, cores: list[int]) -> PathsProbed:
    """Every path that two workers on this host would have. Raises KvrelayError when they cannot even speak."""
    transfer, secret = TransferConfig(), secrets.token_hex(32)
    begin = Begin(secret, secrets.token_hex(8), 2 * num_blocks, transfer)
    decoder = msgspec.json.Decoder(WorkerEndpoint)
    async with child_process(PROGRAM, cores) as child:
        await child.tell(begin)
        peer = await child.hear(decoder, START_S)
        return await _probe(peer, secret.encode(), transfer, num_blocks, num_rounds)


async def _probe(
    peer: WorkerEndpoint, secret: bytes, transfer: TransferConfig, num_blocks: int, num_rounds: int
) -> PathsProbed:
    identity = PeerIdentity("first process", "prefill", secrets.token_hex(8), FINGERPRINT)
    faults: list[BaseException] = []
    memory = PoolMemory(num_blocks, LAYOUT.block_bytes)
    sender = make_sender(memory, identity, secret, transfer)
    try:
        prober = PathProber(
            BlockLedger(num_blocks, identity.incarnation),
            memory,
            DirectBlocks(memory),
            sender,
            OpenRequests(),
            make_control=lambda: ControlConnections(identity, secret, check_peer),
            push_timeout_s=transfer.push_timeout_s,
            on_room=lambda: None,
            on_failure=faults.append,
        )
        found = await prober.probe(peer, num_blocks, num_rounds)
    finally:
        await sender.close()
        memory.close()
    if faults:
        raise KvrelayError(f"the probe of this host broke down: {faults[0]}")
    return found
