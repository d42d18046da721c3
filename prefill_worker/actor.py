"""The prefill worker as an actor."""

from __future__ import annotations

from kv_transport.paths import make_sender
from pd_core.engine import Engine
from pd_rpc.tls import load_tls
from pd_worker.worker_actor import WorkerActor
from pd_worker.worker_pool import WorkerPool
from prefill_worker.worker import PrefillWorker


class PrefillActor(WorkerActor):
    role = "prefill"

    def make_worker(self, engine: Engine, pool: WorkerPool) -> PrefillWorker:
        tls = load_tls(self.config.tls)
        return PrefillWorker(
            name=self.name,
            incarnation=self.incarnation,
            secret=self.secret,
            config=self.config,
            engine=engine,
            memory=pool.memory,
            blocks=pool.blocks,
            transport=lambda _, identity: make_sender(
                pool.memory, identity, self.secret, self.config.transfer, tls=tls
            ),
        )
