"""Log files of one run of the launcher: `<state folder>/logs/<when>-<pid>-<who>.jsonl`, the newest runs kept."""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path

from pd_core.errors import ConfigError
from pd_core.logs import JsonLines

MAX_FILES = 60


class LogFiles:
    """Names the files of this run. Makes the folder, private, and removes the oldest files beyond MAX_FILES.

    Raises ConfigError when the folder cannot be had.
    """

    def __init__(self, state_dir: Path, pid: int) -> None:
        self.folder = state_dir / "logs"
        self._prefix = f"{time.strftime('%Y%m%d-%H%M%S')}-{pid}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in sorted(self.folder.glob("*.jsonl"))[:-MAX_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"the log folder {self.folder} cannot be used: {error.strerror}") from error

    def path(self, name: str) -> Path:
        return self.folder / f"{self._prefix}-{name}.jsonl"


def log_to_file(file: Path) -> logging.Handler:
    """All log lines of this process go to `file`, and nowhere else. Remove the handler to end it.

    Raises ConfigError when the file cannot be made.
    """
    try:
        handler = logging.FileHandler(file, encoding="utf-8")
        file.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"the log file {file} cannot be made: {error.strerror}") from error
    handler.setFormatter(JsonLines())
    handler.addFilter(_without_ray_stamp)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


def _without_ray_stamp(record: logging.LogRecord) -> bool:
    """Ray gives every record of its process a second time stamp."""
    vars(record).pop("_ray_timestamp_ns", None)
    return True


class LoggedStream(io.TextIOBase):
    """Stands in for standard output while Ray is in the process: what it prints there becomes log lines.

    Our own standard output is for whoever reads it, often a program.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info(line)
        return len(text)
