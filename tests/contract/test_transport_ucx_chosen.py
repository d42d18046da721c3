"""The probe of UCX on this machine, and the path from the config to blocks that arrive."""

import msgspec
import pytest
from transport_parts import SECRET, Pair, SharedMemory, identity

from kv_transport.paths import make_receiver, make_sender
from kv_transport.ucx_offer import UcxReport
from kv_transport.ucx_probe import probe_ucx
from kv_transport.ucx_settings import rdma_devices
from pd_core.config import TransferConfig
from pd_core.errors import ConfigError, TransferError

REPORT = UcxReport(
    version="1.21.0",
    library="wheel",
    library_file="",
    transports=["tcp/lo"],
    has_cuda=False,
    gb_per_s=1.0,
    tcp_gb_per_s=2.0,
    latency_s=0.001,
)


def test_two_processes_of_this_machine_reach_each_other_over_ucx_and_are_measured():
    report = probe_ucx("127.0.0.1")
    assert int(report.version.split(".")[1]) >= 19 or int(report.version.split(".")[0]) > 1
    assert report.library in ("wheel", "system")
    assert report.library_file.endswith(".so") or ".so." in report.library_file
    assert "tcp/lo" in report.transports
    assert report.has_rdma is bool(rdma_devices() and report.library == "system")
    assert report.gb_per_s > 0.01
    assert report.tcp_gb_per_s > 0.01
    assert 0 < report.latency_s < 1
    assert 0 < report.seconds < 20


def test_a_transport_that_is_not_there_is_a_sentence(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc")
    with pytest.raises(TransferError, match=r"UCX does not work: .*UCX cannot be started"):
        probe_ucx("127.0.0.1")


def test_an_address_that_is_not_ours_is_a_sentence():
    with pytest.raises(TransferError, match=r"UCX does not work: transfer\.host 192\.0\.2\.1 is no address of this"):
        probe_ucx("192.0.2.1")


async def test_where_the_config_asks_for_ucx_blocks_go_over_it_alone(monkeypatch):
    monkeypatch.setattr("kv_transport.ucx_probe.probe_ucx", lambda host, prefer_system: REPORT)
    transfer = TransferConfig(path="ucx")
    source, target = SharedMemory(4, 8192), SharedMemory(4, 8192)
    source.buffer[:] = bytes(range(256)) * (len(source.buffer) // 256)
    receiver = make_receiver(target, identity("decode"), SECRET, transfer)
    await receiver.start()
    sender = make_sender(source, identity("prefill"), SECRET, transfer)
    pair = Pair(source, target, receiver, sender)
    try:
        ticket, arrivals = pair.open([3, 1])
        assert [address.path for address in ticket.addresses] == ["ucx"]
        receipt = await pair.push(ticket, [0, 1], [0, 2])
        await arrivals.until(lambda a: a.verified == {0, 1})
        assert pair.received(ticket) == pair.sent([0, 2])
        assert receipt.path == "ucx"
        assert sender.path_to("boot") == "ucx"
    finally:
        await sender.close()
        await receiver.close()
        source.close()
        target.close()


def test_where_ucx_alone_is_allowed_and_does_not_work_neither_side_starts(monkeypatch):
    def crash(host: str, prefer_system: bool) -> UcxReport:
        raise TransferError("UCX crashed: a probe's process ended with SIGSEGV")

    monkeypatch.setattr("kv_transport.ucx_probe.probe_ucx", crash)
    memory = SharedMemory(1, 8192)
    for make in (make_receiver, make_sender):
        with pytest.raises(ConfigError, match=r"transfer\.path is ucx: UCX crashed: .* SIGSEGV"):
            make(memory, identity("decode"), SECRET, TransferConfig(path="ucx"))
    memory.close()


async def test_with_auto_and_no_rdma_blocks_go_another_way_and_tcp_says_why_not_this_one(monkeypatch):
    monkeypatch.setattr("kv_transport.ucx_probe.rdma_devices", lambda: [])
    source, target = SharedMemory(2, 8192), SharedMemory(2, 8192)
    receiver = make_receiver(target, identity("decode"), SECRET, TransferConfig())
    await receiver.start()
    sender = make_sender(source, identity("prefill"), SECRET, TransferConfig())
    pair = Pair(source, target, receiver, sender)
    try:
        ticket, arrivals = pair.open([0])
        assert [address.path for address in ticket.addresses] == ["shm", "tcp"]
        far = msgspec.structs.replace(ticket, addresses=ticket.addresses[1:])
        await pair.push(far, [0], [1])
        await arrivals.until(lambda a: a.verified == {0})
        assert sender.path_to("boot").startswith("tcp; ucx is not used: this host has no RDMA device")
    finally:
        await sender.close()
        await receiver.close()
        source.close()
        target.close()
