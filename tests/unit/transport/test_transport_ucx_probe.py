"""A probe of UCX makes a sentence of whatever its child does."""

import sys
import time
from pathlib import Path

import pytest

from kv_transport.ucx_probe import probe_ucx
from pd_core.errors import TransferError

REPORT = (
    '{"version":"1.21.0","library":"wheel","library_file":"/x","transports":["tcp/lo"],"has_cuda":false,'
    '"gb_per_s":1.0,"tcp_gb_per_s":2.0,"latency_s":0.001}'
)


def stub(code: str) -> list[str]:
    """A child that does this instead."""
    return [sys.executable, "-c", f"import os, signal, sys, time\n{code}"]


def test_a_report_comes_back_with_what_it_cost_whatever_ucx_wrote_before_it():
    said = f"[123.4] UCX WARN something\\n{REPORT}"
    report = probe_ucx("127.0.0.1", command=stub(f"print('''{said}''')"))
    assert report.transports == ["tcp/lo"]
    assert 0 < report.seconds < 5
    assert report.describe().startswith("UCX 1.21.0 (wheel, without CUDA) over tcp/lo: 1.00 GB/s, 1000 us")


def test_the_child_is_told_where_and_what_it_is_and_which_library_to_prefer():
    told = "assert sys.argv[1:] == ['192.0.2.7', 'receive']\nassert os.environ['RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY']"
    probe_ucx("192.0.2.7", prefer_system=True, command=stub(f"{told}\nprint('{REPORT}')"))


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_a_crash_is_a_sentence_naming_the_signal(name):
    with pytest.raises(TransferError, match=f"UCX crashed: .* {name}"):
        probe_ucx("127.0.0.1", command=stub(f"os.kill(os.getpid(), signal.{name})"))


def test_a_hang_is_a_sentence_after_the_deadline_and_nothing_is_left_running(tmp_path):
    pid_file = tmp_path / "pids"
    forks = f"pid = os.fork()\nopen({str(pid_file)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(60)"
    started_s = time.monotonic()
    with pytest.raises(TransferError, match=r"UCX hung: nothing came of a probe within 1\.5 s"):
        probe_ucx("127.0.0.1", deadline_s=1.5, command=stub(forks))
    assert time.monotonic() - started_s < 5
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 2
    while any(is_running(pid) for pid in pids):  # all are killed; the kernel may be busy with one of them for a moment
        assert time.monotonic() - started_s < 5
        time.sleep(0.01)


def test_a_child_that_explains_itself_is_quoted():
    with pytest.raises(TransferError, match=r"^UCX does not work: no usable transports$"):
        probe_ucx("127.0.0.1", command=stub("sys.stderr.write('trace\\nno usable transports\\n'); sys.exit(1)"))


def test_a_child_that_says_nothing_is_reported_with_its_status():
    with pytest.raises(TransferError, match="UCX does not work: exit status 3"):
        probe_ucx("127.0.0.1", command=stub("sys.exit(3)"))


@pytest.mark.parametrize("said", ["", "nonsense", "{}", '{"version": 1}', "[1, 2"])
def test_a_child_that_ends_well_without_a_report_is_no_working_ucx(said):
    with pytest.raises(TransferError, match="without a report"):
        probe_ucx("127.0.0.1", command=stub(f"print('{said}')"))


def test_without_ucxx_the_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("kv_transport.ucx_probe.is_installed", lambda: False)
    with pytest.raises(TransferError, match=r"pip install '\.\[ucx\]'"):
        probe_ucx("127.0.0.1", command=stub("sys.exit(0)"))


def is_running(pid: int) -> bool:
    """Not ended, and not waiting to be reaped either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
