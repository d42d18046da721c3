"""Log lines: one JSON object a line, with the request's id where there is one."""

from __future__ import annotations

import logging

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({})))


class JsonLines(logging.Formatter):
    """`log.info("committed", extra={"request_id": …, "num_blocks": 3})` becomes one line of JSON.

    Keys of `extra` stand beside time_s, level, logger, message and, after an exception, its traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time_s": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD and key != "taskName"}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
