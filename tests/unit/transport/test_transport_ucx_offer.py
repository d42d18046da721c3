"""Whether a worker uses UCX, by what is there and what a probe found."""

import msgspec
import pytest

from kv_transport.ucx_offer import (
    NO_RDMA,
    NOT_ENCRYPTED,
    NOT_INSTALLED,
    UcxFacts,
    UcxOffer,
    UcxReport,
    decide,
    needs_probe,
)
from kv_transport.ucx_probe import examine_ucx
from pd_core.config import TransferConfig
from pd_core.errors import ConfigError, TransferError

TCP_ONLY = UcxReport(
    version="1.21.0",
    library="wheel",
    library_file="/x/site-packages/libucx/lib/libucp.so",
    transports=["tcp/eth0"],
    has_cuda=False,
    gb_per_s=1.5,
    tcp_gb_per_s=4.0,
    latency_s=0.0002,
)
FAST_TCP = msgspec.structs.replace(TCP_ONLY, gb_per_s=4.1)
RDMA = msgspec.structs.replace(TCP_ONLY, library="system", transports=["rc_mlx5/mlx5_0:1", "tcp/eth0"], has_cuda=True)
HERE = UcxFacts(is_installed=True, has_rdma_device=True, has_tls=False)


def facts(**changes: object) -> UcxFacts:
    return msgspec.structs.replace(HERE, **changes)


@pytest.mark.parametrize(
    ("path", "known", "expected"),
    [
        ("auto", facts(), True),
        ("auto", facts(has_rdma_device=False), False),
        ("auto", facts(is_installed=False), False),
        ("auto", facts(has_tls=True), False),
        ("ucx", facts(has_rdma_device=False), True),
        ("ucx", facts(is_installed=False), False),
        ("ucx", facts(has_tls=True), False),
        ("tcp", facts(), False),
        ("shm", facts(), False),
    ],
)
def test_only_a_probe_that_can_change_the_decision_is_run(path, known, expected):
    assert needs_probe(path, known) is expected


@pytest.mark.parametrize(
    ("path", "known", "reason"),
    [
        ("auto", facts(is_installed=False), NOT_INSTALLED),
        ("auto", facts(has_tls=True, report=RDMA), NOT_ENCRYPTED),
        ("auto", facts(has_rdma_device=False), NO_RDMA),
        ("auto", facts(failure="UCX crashed: SIGSEGV"), "UCX crashed: SIGSEGV"),
        ("tcp", facts(report=RDMA), "transfer.path is tcp"),
        ("shm", facts(report=RDMA), "transfer.path is shm"),
    ],
)
def test_a_path_that_is_left_out_says_why(path, known, reason):
    assert decide(path, known) == UcxOffer(False, reason)


def test_ucx_without_rdma_that_is_slower_than_tcp_is_left_out_with_both_figures_and_what_rdma_needs():
    offer = decide("auto", facts(report=TCP_ONLY))
    assert not offer.is_used
    for part in ("1.21.0", "wheel", "1.19", "1.50 GB/s", "4.00"):
        assert part in offer.reason


@pytest.mark.parametrize(
    ("path", "report"), [("auto", RDMA), ("auto", FAST_TCP), ("ucx", TCP_ONLY), ("ucx", RDMA)], ids=str
)
def test_ucx_that_is_better_or_asked_for_is_used_and_described(path, report):
    offer = decide(path, facts(report=report))
    assert offer.is_used
    assert report.transports[0] in offer.reason


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (facts(is_installed=False), "transfer.path is ucx: ucxx is not installed"),
        (facts(failure="UCX hung: nothing came"), "transfer.path is ucx: UCX hung: nothing came"),
        (facts(has_tls=True), "transfer.path is ucx: tls is set"),
    ],
)
def test_where_ucx_alone_is_allowed_and_does_not_work_the_start_fails_with_the_reason(known, sentence):
    with pytest.raises(ConfigError, match=sentence) as raised:
        decide("ucx", known)
    assert raised.value.param == "transfer.path"


class Probes:
    """A probe that finds what it is told, by whether the system's UCX is preferred."""

    def __init__(self, system: UcxReport | str, wheel: UcxReport | str) -> None:
        self._found = {True: system, False: wheel}
        self.asked: list[bool] = []

    def __call__(self, host: str, *, prefer_system: bool) -> UcxReport:
        self.asked.append(prefer_system)
        found = self._found[prefer_system]
        if isinstance(found, str):
            raise TransferError(found)
        return found


AUTO, UCX = TransferConfig(), TransferConfig(path="ucx")


@pytest.fixture
def rdma_host(monkeypatch):
    monkeypatch.setattr("kv_transport.ucx_probe.rdma_devices", lambda: ["mlx5_0:1"])
    monkeypatch.setattr("kv_transport.ucx_probe.is_installed", lambda: True)
    monkeypatch.delenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", raising=False)


def test_with_rdma_devices_the_systems_ucx_is_tried_first_and_then_loaded(rdma_host, monkeypatch):
    environment: dict[str, str] = {}
    monkeypatch.setattr("kv_transport.ucx_probe.os.environ", environment)
    probes = Probes(RDMA, TCP_ONLY)
    assert examine_ucx(AUTO, has_tls=False, probe=probes).is_used
    assert probes.asked == [True]
    assert environment == {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}


@pytest.mark.parametrize("system", [TCP_ONLY, "UCX crashed: a probe's process ended with SIGSEGV"], ids=str)
def test_where_the_systems_ucx_has_no_rdma_the_wheels_is_judged_and_nothing_is_pretended(rdma_host, system):
    probes = Probes(system, TCP_ONLY)
    offer = examine_ucx(AUTO, has_tls=False, probe=probes)
    assert probes.asked == [True, False]
    assert not offer.is_used
    assert "no RDMA" in offer.reason


def test_without_rdma_devices_auto_asks_nobody(monkeypatch):
    monkeypatch.setattr("kv_transport.ucx_probe.rdma_devices", lambda: [])
    probes = Probes("never", "never")
    assert examine_ucx(AUTO, has_tls=False, probe=probes) == UcxOffer(False, NO_RDMA)
    assert probes.asked == []


def test_where_every_probe_fails_the_last_reason_is_given(rdma_host):
    with pytest.raises(ConfigError, match=r"transfer\.path is ucx: the wheel is broken"):
        examine_ucx(UCX, has_tls=False, probe=Probes("the system is broken", "the wheel is broken"))
