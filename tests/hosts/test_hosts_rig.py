"""The hosts that tests make are hosts as far as a program can tell, and nothing of them is ever left."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from host_network import HostNetwork, host_network
from host_processes import read_line

PORT = 7100
OWNER = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from host_network import host_network
with host_network("a", "b", kept=[]) as network:
    program = network.hosts["a"].start("host_wire.py", ["lo", "lo", "0", "0", "1"], Path(sys.argv[2]))
    program.read_line()
    hosts = [network.switch, *network.hosts.values()]
    print(json.dumps([host.pid for host in hosts]), flush=True)
    time.sleep(60)
"""


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def round_trip_s(network: HostNetwork, source: str, target: str, within_s: float = 2.0) -> float:
    """A connection from one host to another, an echo on it, and how long that took. Raises OSError."""
    with network.hosts[target].entered():
        listener = socket.create_server((network.ipv4(target), PORT))
    with listener:
        answering = threading.Thread(target=echo_once, args=(listener, within_s))
        answering.start()
        began_s = time.monotonic()
        try:
            with network.hosts[source].entered():
                sock = socket.create_connection((network.ipv4(target), PORT), within_s)
            with sock:
                sock.sendall(b"x")
                assert sock.recv(1) == b"x"
        finally:
            answering.join()
        return time.monotonic() - began_s


def echo_once(listener: socket.socket, within_s: float) -> None:
    listener.settimeout(within_s)
    try:
        sock, _ = listener.accept()
    except TimeoutError:
        return
    with sock:
        sock.settimeout(within_s)
        sock.sendall(sock.recv(1))


def test_a_host_has_its_own_name_processes_temporary_files_and_shared_memory(
    network: HostNetwork, tmp_path: Path
) -> None:
    host, other = network.hosts["prefill"], network.hosts["decode"]
    for folder in ("/tmp", "/dev/shm"):  # noqa: S108
        host.run("touch", f"{folder}/of-prefill")
        assert host.run("ls", folder).split().count("of-prefill") == 1
        assert "of-prefill" not in other.run("ls", folder)
        assert not Path(folder, "of-prefill").exists()
    assert host.run("hostname").strip() == "prefill"
    assert host.run("sh", "-c", "echo /proc/[0-9]*").split()[0] == "/proc/1"
    assert len(host.run("sh", "-c", "echo /proc/[0-9]*").split()) == 2  # its first process and that shell
    (tmp_path / "shared").write_text("kept")
    assert host.run("cat", str(tmp_path / "shared")) == "kept"


def test_nothing_of_it_is_to_be_seen_on_the_machine(network: HostNetwork) -> None:
    with host_network("prefill", kept=[]) as second:
        assert second.ipv4("prefill") == network.ipv4("prefill")
        assert round_trip_s(network, "prefill", "decode") < 1.0
        assert not [name for name in interfaces() if name.startswith("to-")]


def test_when_its_owner_is_killed_everything_is_gone_at_once(tmp_path: Path) -> None:
    folder = str(Path(__file__).parent)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, folder, str(tmp_path / "log")], stdout=subprocess.PIPE, start_new_session=True
    )
    with owner:
        assert owner.stdout is not None
        pids = json.loads(read_line(owner.stdout, 20.0))
        inside = [pid for pid in processes() if namespace(pid) in {namespace(first) for first in pids}]
        assert len(inside) >= len(pids) + 1  # the program that runs in one of them too
        owner.send_signal(signal.SIGKILL)
        owner.wait(5.0)
    ends_s = time.monotonic() + 5.0
    while left := [pid for pid in inside if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < ends_s, left
        time.sleep(0.01)


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return f"process {pid} has ended"


def test_an_unplugged_or_silent_link_lets_nothing_through_until_it_is_mended(network: HostNetwork) -> None:
    link = network.links["decode"]
    for harm, mend in ((link.unplug, link.plug_in), (link.swallow, link.deliver)):
        harm()
        with pytest.raises(TimeoutError):
            round_trip_s(network, "prefill", "decode", 0.3)
        mend()
        assert round_trip_s(network, "prefill", "decode") < 2.0


def test_a_slow_wire_adds_its_delay_to_every_crossing_and_loses_what_it_is_told_to(
    network: HostNetwork, tmp_path: Path
) -> None:
    network.links["decode"].slow_by_wire(0.05, 0.0, tmp_path / "wire.log")
    assert 0.2 <= round_trip_s(network, "prefill", "decode") < 1.0  # there and back for the connection and the echo
    network.links["prefill"].slow_by_wire(0.0, 1.0, tmp_path / "wire.log")
    with pytest.raises(TimeoutError):
        round_trip_s(network, "prefill", "decode", 0.5)


def test_a_narrow_link_passes_so_many_bytes_a_second(network: HostNetwork) -> None:
    link, num_bytes = network.links["prefill"], 300_000
    link.narrow(200_000)
    with network.hosts["decode"].entered():
        listener = socket.create_server((network.ipv4("decode"), PORT))
    with listener, network.hosts["prefill"].entered():
        sock = socket.create_connection((network.ipv4("decode"), PORT), 5.0)
        receiver, _ = listener.accept()
    with sock, receiver:
        receiver.settimeout(5.0)
        began_s = time.monotonic()
        sending = threading.Thread(target=sock.sendall, args=(bytes(num_bytes),))
        sending.start()
        received = 0
        while received < num_bytes:
            received += len(receiver.recv(1 << 16))
        sending.join()
    assert 1.2 < time.monotonic() - began_s < 3.5
    link.widen()
