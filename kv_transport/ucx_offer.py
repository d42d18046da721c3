"""Whether a worker uses the path "ucx", and why. Pure.

| transfer.path | ucxx there | RDMA there | the probe             | used |
| auto          | no         |            |                       | no   |
| auto          | yes        | no         | is not run            | no   |
| auto          | yes        | yes        | finds RDMA            | yes  |
| auto          | yes        | yes        | finds UCX over TCP    | where it was faster than tcp |
| auto          | yes        | yes        | fails                 | no   |
| ucx           |            |            | works                 | yes  |
| ucx           |            |            | fails, or has no ucxx | the start fails |
"""

from __future__ import annotations

import msgspec

from pd_core.errors import ConfigError

HOW_TO_INSTALL = "pip install '.[ucx]' in kvrelay's folder"
NOT_INSTALLED = f"ucxx is not installed: {HOW_TO_INSTALL}"
NOT_ENCRYPTED = "tls is set, and what UCX carries cannot be encrypted"
NO_RDMA = (
    "this host has no RDMA device, and over TCP UCX is no faster than tcp; transfer.path: ucx uses it all the same"
)


class UcxReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found.

    library:      "wheel" or "system", and where its file lies
    transports:   those that connections of the path can use, as "tcp/eth0", "rc_mlx5/mlx5_0:1"
    has_cuda:     whether this UCX could move GPU memory itself
    gb_per_s:     of pushes of 24 blocks of 360 KiB between two processes, digests among it; tcp_gb_per_s: of "tcp", in
                  turn with them
    latency_s:    of a push of one block of 4 KiB, the fastest
    seconds:      that the probe took
    """

    version: str
    library: str
    library_file: str
    transports: list[str]
    has_cuda: bool
    gb_per_s: float
    tcp_gb_per_s: float
    latency_s: float
    seconds: float = 0.0

    @property
    def has_rdma(self) -> bool:
        return any(name.startswith(("rc", "dc", "ud")) for name in self.transports)

    def describe(self) -> str:
        """For people."""
        cuda = "with" if self.has_cuda else "without"
        return (
            f"UCX {self.version} ({self.library}, {cuda} CUDA) over {', '.join(self.transports)}: "
            f"{self.gb_per_s:.2f} GB/s, {self.latency_s * 1e6:.0f} us; tcp: {self.tcp_gb_per_s:.2f} GB/s"
        )


class UcxFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before, and from, a probe: `report` when it worked, `failure` when it did not, neither without one.

    has_rdma_device: whether the host has one that is up
    """

    is_installed: bool
    has_rdma_device: bool
    has_tls: bool
    report: UcxReport | None = None
    failure: str | None = None


class UcxOffer(msgspec.Struct, frozen=True):
    """reason: why it is used or why not, for people"""

    is_used: bool
    reason: str


def needs_probe(path: str, facts: UcxFacts) -> bool:
    """Whether the decision waits for one: seconds, of two processes."""
    if path == "ucx":
        return facts.is_installed and not facts.has_tls
    return path == "auto" and facts.is_installed and facts.has_rdma_device and not facts.has_tls


def decide(path: str, facts: UcxFacts) -> UcxOffer:
    """Raises ConfigError when the config allows nothing else and it does not work."""
    reason = _why_not(path, facts)
    if reason is None:
        return UcxOffer(True, facts.report.describe() if facts.report else "")
    if path == "ucx":
        raise ConfigError(f"transfer.path is ucx: {reason}", param="transfer.path")
    return UcxOffer(False, reason)


def _why_not(path: str, facts: UcxFacts) -> str | None:
    if path not in ("auto", "ucx"):
        return f"transfer.path is {path}"
    if facts.has_tls:
        return NOT_ENCRYPTED
    if not facts.is_installed:
        return NOT_INSTALLED
    if path == "auto" and not facts.has_rdma_device:
        return NO_RDMA
    report = facts.report
    if report is None:
        return facts.failure or "it was not probed"
    if path == "ucx" or report.has_rdma or report.gb_per_s > report.tcp_gb_per_s:
        return None
    return (
        f"no RDMA with UCX {report.version} ({report.library}); that needs the system's UCX, 1.19 or later, with its "
        f"InfiniBand transports. Over TCP it moved {report.gb_per_s:.2f} GB/s, tcp {report.tcp_gb_per_s:.2f}"
    )
