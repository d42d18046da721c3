"""Several hosts on one machine, joined by a switch.

    host a                      the switch                    host b
    eth0 ======= veth ======= to-a [bridge] to-b ======= veth ======= eth0
                  ^ a Link: unplugged, silent, narrow, slow, lossy

The switch is a host of its own too, so no interface, address or name of all this exists on the machine itself: any
number of such networks can be there at once, with the same addresses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from host_processes import Host

TOOLS = ("ip", "tc", "nsenter", "unshare")
REPOSITORY = Path(__file__).parents[2]
BRIDGE = "bridge"
QUEUE_S = 0.4
"""Of a narrow link: how long a packet may wait in it before the next is lost."""


def port_of(name: str) -> str:
    """The switch's interface that a host's cable is plugged into."""
    return f"to-{name}"


class Link:
    """The cable from one host to the switch. Harm done to it lasts until it is mended."""

    def __init__(self, switch: Host, host: Host) -> None:
        self._switch = switch
        self._host = host
        self._port = port_of(host.name)
        self._bridged = self._port

    def unplug(self) -> None:
        """Both ends see that there is no signal."""
        self._switch.ip(f"link set {self._port} down")

    def plug_in(self) -> None:
        self._switch.ip(f"link set {self._port} up")

    def swallow(self) -> None:
        """Packets vanish in both directions and nobody is told."""
        self._switch.ip(f"link set {self._bridged} nomaster")

    def deliver(self) -> None:
        self._switch.ip(f"link set {self._bridged} master {BRIDGE}")

    def narrow(self, bytes_per_s: int) -> None:
        """To so many bytes a second in either direction."""
        rate = f"root tbf rate {bytes_per_s}bps burst 8kb latency {round(QUEUE_S * 1000)}ms"
        self._host.run("tc", "qdisc", "replace", "dev", "eth0", *rate.split())
        self._switch.run("tc", "qdisc", "replace", "dev", self._port, *rate.split())

    def widen(self) -> None:
        self._host.run("tc", "qdisc", "del", "dev", "eth0", "root")
        self._switch.run("tc", "qdisc", "del", "dev", self._port, "root")

    def slow_by_netem(self, delay_s: float, loss: float) -> None:
        """Late by so much in either direction, and such a share of the packets lost. Raises OSError without netem."""
        harm = f"root netem delay {round(delay_s * 1000)}ms loss {loss:.2%}"
        self._host.run("tc", "qdisc", "replace", "dev", "eth0", *harm.split())
        self._switch.run("tc", "qdisc", "replace", "dev", self._port, *harm.split())

    def slow_by_wire(self, delay_s: float, loss: float, log: Path) -> None:
        """The same by a program of ours between the port and the switch."""
        wire_in, wire_out = f"in-{self._host.name}", f"out-{self._host.name}"
        self._switch.ip(
            f"link set {self._port} nomaster",
            f"link add {wire_in} type veth peer name {wire_out}",
            f"link set {wire_in} up",
            f"link set {wire_out} up master {BRIDGE}",
        )
        self._host.ip("link set eth0 gso_max_segs 1")  # frames as on a cable, not many in one
        self._bridged = wire_out
        wire = self._switch.start("host_wire.py", [self._port, wire_in, str(delay_s), str(loss), "1"], log)
        assert wire.read_line() == "ready"


class HostNetwork:
    """Hosts by name, each with an IPv4 and an IPv6 address. `close` ends them with all that runs in them.

    kept: see Host
    """

    def __init__(self, names: list[str], kept: list[Path]) -> None:
        self._ended = contextlib.ExitStack()
        self.hosts: dict[str, Host] = {}
        self.links: dict[str, Link] = {}
        try:
            self.switch = self._make_host("switch", kept)
            self.switch.ip(f"link add {BRIDGE} type bridge forward_delay 0 mcast_snooping 0", f"link set {BRIDGE} up")
            for name in names:
                self.hosts[name] = self._make_host(name, kept)
                self._plug(name)
        except BaseException:
            self.close()
            raise

    def ipv4(self, name: str) -> str:
        return f"10.77.0.{1 + list(self.hosts).index(name)}"

    def ipv6(self, name: str) -> str:
        return f"fd77::{1 + list(self.hosts).index(name)}"

    def name_by_ipv6(self, name: str, host: str) -> None:
        """All hosts know `name` by nothing but the IPv6 address of `host`."""
        for other in self.hosts.values():
            other.run("tee", "-a", "/etc/hosts", lines=f"{self.ipv6(host)} {name}\n")

    def close(self) -> None:
        self._ended.close()

    def _make_host(self, name: str, kept: list[Path]) -> Host:
        host = Host(name, kept)
        self._ended.callback(host.close)
        host.ip("link set lo up")
        return host

    def _plug(self, name: str) -> None:
        host = self.hosts[name]
        port = port_of(name)
        self.switch.ip(
            f"link add {port} type veth peer name eth0 netns {host.pid}", f"link set {port} up master {BRIDGE}"
        )
        # nodad: an IPv6 address may be used at once; nobody else has it.
        host.ip(
            f"addr add {self.ipv4(name)}/24 dev eth0",
            f"addr add {self.ipv6(name)}/64 dev eth0 nodad",
            "link set eth0 up",
        )
        self.links[name] = Link(self.switch, host)


@contextlib.contextmanager
def host_network(*names: str, kept: list[Path]) -> Iterator[HostNetwork]:
    """kept: folders below /tmp that this process and programs in the hosts share."""
    network = HostNetwork(list(names), [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *kept])
    try:
        yield network
    finally:
        network.close()


@functools.cache
def why_no_hosts() -> str | None:
    """Why this machine cannot have such hosts; None when it can."""
    if not sys.platform.startswith("linux"):
        return "hosts on one machine need Linux's namespaces"
    if os.geteuid() != 0:
        return "hosts on one machine need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts on one machine need {', '.join(missing)} (packages iproute2 and util-linux)"
    try:
        with host_network("a", "b", kept=[]) as network:
            network.hosts["a"].run("true")
    except OSError as error:
        return f"this machine allows no hosts: {error}"
    return None


@functools.cache
def why_no_netem() -> str | None:
    """Why the kernel cannot make links slow and lossy by itself; None when it can."""
    with host_network("a", kept=[]) as network:
        try:
            network.links["a"].slow_by_netem(0.001, 0.0)
        except OSError as error:
            return f"this kernel has no netem: {error}"
    return None
