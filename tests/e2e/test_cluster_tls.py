"""A whole cluster under TLS, on v6 addresses: supervisor, router and workers, and KV over tcp."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fake_cluster import expected_ids, fake_cluster, slow_config
from tls_authority import Authority

from pd_core.errors import KvrelayError
from pd_core.messages import WORKER_REPLIES
from pd_rpc.client import RpcClient
from pd_rpc.wire import PeerIdentity

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(120)]
STRANGER = PeerIdentity("stranger", "router", "boot")


async def test_a_cluster_serves_under_tls_and_takes_nobody_without(tmp_path: Path) -> None:
    files = msgspec.to_builtins(Authority(tmp_path).issue())
    config = slow_config(tls=files, transfer={"host": "::1", "path": "tcp"})
    async with fake_cluster(config, tmp_path) as fake:
        outcome = await fake.ask("hello", 8)
        assert outcome.status == 200
        assert outcome.body["choices"][0]["token_ids"] == expected_ids("hello", 8)
        page = (await fake.http.get(f"/v1/requests/{outcome.body['id']}")).json()
        assert page["transfer"]["path"] == "tcp"
        for endpoint in fake.cluster.endpoints:
            assert endpoint.host == "::1"
            with pytest.raises(KvrelayError, match="speaks TLS"):
                await RpcClient.connect(
                    endpoint.host, endpoint.port, identity=STRANGER, secret=bytes(32), replies=WORKER_REPLIES
                )
