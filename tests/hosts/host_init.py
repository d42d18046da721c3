"""The first process of a host that tests make: it prepares what is the host's own, and the host lives as long as it.

    unshare --net --mount --uts --ipc --pid --fork ... python host_init.py NAME [FOLDER ...]

It says "ready" on standard output and ends when its standard input does: when whoever made the host closes it, or has
ended in whatever way. With it the kernel ends every process of the host and takes its interfaces away, so that nothing
is ever left that would have to be found and removed. FOLDERs that lie below /tmp stay what they are there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

MS_BIND = 4096
TEMPORARY = Path("/tmp")  # noqa: S108 - the folder itself is what is replaced
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    """Raises OSError."""
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {source} on {target}")


def prepare(name: str, kept: list[Path]) -> None:
    """The host's own name, processes, temporary folder, shared memory and names of other hosts."""
    socket.sethostname(name)
    mount("proc", "/proc", "proc")
    hidden = [(folder, os.open(folder, os.O_PATH)) for folder in kept if TEMPORARY in folder.parents]
    mount("tmpfs", str(TEMPORARY), "tmpfs")
    mount("tmpfs", "/dev/shm", "tmpfs")  # noqa: S108
    for folder, fd in hidden:
        folder.mkdir(parents=True)
        mount(f"/proc/self/fd/{fd}", str(folder), "", MS_BIND)
        os.close(fd)
    TEMPORARY.chmod(0o1777)
    names = TEMPORARY / "etc-hosts"
    names.write_text("127.0.0.1 localhost\n::1 localhost\n")
    mount(str(names), "/etc/hosts", "", MS_BIND)


def reap(*_: object) -> None:
    """Processes that lost their parent are ours now, and leave when they have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def main() -> None:
    name, *kept = sys.argv[1:]
    prepare(name, [Path(folder) for folder in kept])
    signal.signal(signal.SIGCHLD, reap)
    os.write(1, b"ready\n")
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main()
