"""Finds out whether UCX works here, and how fast, in processes of its own: a bad UCX crashes or hangs the one it is in.

we            child, which receives           its child, which sends
run ------->  ucx_probe_child HOST receive --> ucx_probe_child HOST send
    <-------  one line of JSON <-------------- one line of JSON
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kv_transport.ucx import PATH
from kv_transport.ucx_library import PREFER_SYSTEM, is_installed
from kv_transport.ucx_offer import NOT_INSTALLED, UcxFacts, UcxOffer, UcxReport, decide, needs_probe
from kv_transport.ucx_settings import rdma_devices
from pd_core.config import TransferConfig
from pd_core.errors import TransferError

_log = logging.getLogger(__name__)

PROBE_S = 20.0
CHILD = (sys.executable, "-m", "kv_transport.ucx_probe_child")
MAX_SAID_CHARS = 500

_decode_report = msgspec.json.Decoder(UcxReport).decode


class Probe(Protocol):
    """`probe_ucx`, or what a test has instead."""

    def __call__(self, host: str, *, prefer_system: bool) -> UcxReport: ...


def examine_ucx(transfer: TransferConfig, *, has_tls: bool, probe: Probe | None = None) -> UcxOffer:
    """Whether this worker uses UCX, and why. Takes seconds where a probe is needed; blocks.

    With RDMA devices the system's UCX is tried first, and the one that is found is what this process will load.
    Raises ConfigError when the config allows nothing else and it does not work.
    """
    has_device = bool(rdma_devices()) if transfer.path in ("auto", PATH) else False
    facts = UcxFacts(is_installed=is_installed(), has_rdma_device=has_device, has_tls=has_tls)
    if needs_probe(transfer.path, facts):
        facts = _probed(facts, transfer.host, probe or probe_ucx)
    return decide(transfer.path, facts)


def probe_ucx(
    host: str, *, prefer_system: bool = False, deadline_s: float = PROBE_S, command: Sequence[str] = CHILD
) -> UcxReport:
    """Pushes blocks from one process to another over UCX at `host`, by the path's own code.

    prefer_system: load the system's UCX where there is one
    command: what plays the child; it is told the host and its role
    Raises TransferError with a sentence for people: what crashed, hung or is missing.
    """
    if not is_installed():
        raise TransferError(NOT_INSTALLED)
    began_s = time.monotonic()
    environment = {**os.environ, PREFER_SYSTEM: "true"} if prefer_system else dict(os.environ)
    code, said, complained = _run([*command, host, "receive"], environment, deadline_s)
    if code is None:
        raise TransferError(f"UCX hung: nothing came of a probe within {deadline_s:g} s")
    if code < 0:
        raise TransferError(f"UCX crashed: a probe's process ended with {signal.Signals(-code).name}")
    if code > 0:
        raise TransferError(f"UCX does not work: {_last_line(complained) or f'exit status {code}'}")
    try:
        report = _decode_report(_last_line(said))
    except msgspec.MsgspecError as error:
        raise TransferError(f"UCX's probe ended without a report: {error}") from error
    return msgspec.structs.replace(report, seconds=round(time.monotonic() - began_s, 3))


def _probed(facts: UcxFacts, host: str, probe: Probe) -> UcxFacts:
    failures = []
    for prefer_system in (True, False) if facts.has_rdma_device else (False,):
        try:
            report = probe(host, prefer_system=prefer_system)
        except TransferError as error:
            failures.append(error.message)
            continue
        if report.has_rdma or not prefer_system:
            if prefer_system:
                os.environ[PREFER_SYSTEM] = "true"  # read when ucxx is imported, which is still to come
            _log.info("KV path ucx: %s", report.describe())
            return msgspec.structs.replace(facts, report=report)
    return msgspec.structs.replace(facts, failure=failures[-1])


def _run(command: Sequence[str], environment: Mapping[str, str], within_s: float) -> tuple[int | None, str, str]:
    """Exit status, None when it had to be killed, and what it wrote. Nothing of it is left after that."""
    process = subprocess.Popen(  # our own module, or a test's stand-in
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        said, complained = "", ""
    code = process.poll()
    if code != 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own child too, which is of its session
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    return code, said, complained


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:MAX_SAID_CHARS] if lines else ""
