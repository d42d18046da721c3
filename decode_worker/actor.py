"""The decode worker as an actor."""

from __future__ import annotations

from decode_worker.worker import DecodeWorker
from kv_transport.paths import make_receiver
from pd_core.engine import Engine
from pd_rpc.tls import load_tls
from pd_worker.worker_actor import WorkerActor
from pd_worker.worker_pool import WorkerPool


class DecodeActor(WorkerActor):
    role = "decode"

    def make_worker(self, engine: Engine, pool: WorkerPool) -> DecodeWorker:
        tls = load_tls(self.config.tls)
        return DecodeWorker(
            name=self.name,
            incarnation=self.incarnation,
            secret=self.secret,
            config=self.config,
            engine=engine,
            memory=pool.memory,
            pool=pool.landing,
            transport=lambda memory, identity: make_receiver(
                memory, identity, self.secret, self.config.transfer, pool.landing, tls=tls
            ),
        )
