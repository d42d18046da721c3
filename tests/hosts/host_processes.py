"""A host of its own, as far as a program can tell, and programs that run in it.

Its network, mounts (/tmp, /dev/shm, /etc/hosts), processes and name are its own; the rest of the file tree is this
machine's. Nothing of it has a name outside: what belongs to it ends with its first process, and that ends when this
process closes a pipe or dies. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

COMMAND_S = 10.0
"""Longest wait for `ip`, `tc` and for a host's first process."""
ANSWER_S = 30.0
"""Longest wait for a line of a program, which may have to import half of kvrelay on a busy machine."""
EXIT_S = 15.0
CLONE_NEWNET = 0x40000000
FOLDER = Path(__file__).parent
INIT = FOLDER / "host_init.py"
_libc = ctypes.CDLL(None, use_errno=True)


class Program:
    """A Python program of this folder that runs in a host. Lines go in and come out; its log is a file of ours."""

    def __init__(self, host: Host, script: str, arguments: list[str], log: Path) -> None:
        self.name = f"{script} on {host.name}"
        self.log = log
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [*host.enter_command, sys.executable, str(FOLDER / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
            )

    def read_line(self, within_s: float = ANSWER_S) -> str:
        """Its next line. Fails with the end of its log when none comes."""
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, within_s)
        assert line, f"{self.name} said nothing: {self.log.read_text()[-2000:]}"
        return line

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(only_child(self._process.pid), number)

    def stop(self) -> None:
        """Has it end by itself, which closing its input tells it to. Fails when it does not, or not cleanly."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(EXIT_S)
        assert code == 0, f"{self.name} ended with {code}: {self.log.read_text()[-2000:]}"

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def let_go(self) -> None:
        """After it has ended, or its host has."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait(EXIT_S)


class Host:
    """kept: folders that its programs must see where they are, also below /tmp, which is otherwise the host's own."""

    def __init__(self, name: str, kept: list[Path]) -> None:
        self.name = name
        self._programs: list[Program] = []
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        self._process = subprocess.Popen(
            ["unshare", *namespaces, sys.executable, "-I", "-S", str(INIT), name, *map(str, kept)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if read_line(self._process.stdout, COMMAND_S) != "ready":
            self.close()
            raise OSError(f"host {name} did not start: {self.last_words}")
        self.pid = only_child(self._process.pid)

    @property
    def enter_command(self) -> list[str]:
        """What to put before a command so that it runs in the host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--"]

    def run(self, *command: str, lines: str = "") -> str:
        """What the command says. Raises OSError with its complaint when it fails or does not end."""
        return self._run(self.enter_command, list(command), lines)

    def ip(self, *commands: str) -> None:
        """Each is what follows `ip`; `netns` means pids as we see them. Raises OSError at the first that fails."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--"]
        self._run(enter, ["ip", "-batch", "-"], "".join(f"{command}\n" for command in commands))

    def start(self, script: str, arguments: list[str], log: Path) -> Program:
        program = Program(self, script, arguments, log)
        self._programs.append(program)
        return program

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and those it starts, are on the host's network: what they connect to, they do from
        there. Files and processes stay those of this machine."""
        ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        theirs = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        try:
            _set_network(theirs)
            try:
                yield
            finally:
                _set_network(ours)
        finally:
            os.close(ours)
            os.close(theirs)

    def _run(self, enter: list[str], command: list[str], lines: str) -> str:
        name = f"{' '.join(command)} on {self.name}"
        try:
            done = subprocess.run(
                [*enter, *command], input=lines.encode(), capture_output=True, timeout=COMMAND_S, check=True
            )
        except subprocess.CalledProcessError as error:
            raise OSError(f"{name}: {(error.stderr or error.stdout).decode().strip()}") from error
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{name} did not end within {COMMAND_S:g} s") from error
        return done.stdout.decode()

    def close(self) -> None:
        """Ends everything in it, at once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdin.close()
        self._process.wait(EXIT_S)
        self.last_words = self._process.stderr.read().decode().strip()
        self._process.stdout.close()
        self._process.stderr.close()
        for program in self._programs:
            program.let_go()


def read_line(pipe: IO[bytes], within_s: float) -> str:
    """Without its end; empty when the other side has ended or is silent for so long."""
    ends_s = time.monotonic() + within_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, ends_s - time.monotonic()))
        piece = os.read(pipe.fileno(), 1) if ready else b""
        if not piece:
            return ""
        line += piece
    return line.decode().removesuffix("\n")


def only_child(pid: int) -> int:
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _set_network(fd: int) -> None:
    if _libc.setns(fd, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: the network of another host")
