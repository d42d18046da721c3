"""A log line is one JSON object, whatever is logged."""

from __future__ import annotations

import json
import logging
import sys

from pd_core.errors import Overloaded
from pd_core.logs import JsonLines


def line_of(message: str, *args: object, extra: dict[str, object] | None = None, error: bool = False) -> str:
    logger = logging.getLogger("tests")
    record = logger.makeRecord("tests", logging.INFO, "file", 1, message, args, None, extra=extra)
    if error:
        try:
            raise Overloaded("no room")
        except Overloaded:
            record.exc_info = sys.exc_info()
    return JsonLines().format(record)


def test_a_line_has_time_level_logger_message_and_what_was_added() -> None:
    line = line_of("handoff of %d blocks", 3, extra={"request_id": "r1", "num_blocks": 3})
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time_s") > 0
    assert fields == {
        "level": "info",
        "logger": "tests",
        "message": "handoff of 3 blocks",
        "request_id": "r1",
        "num_blocks": 3,
    }


def test_a_traceback_and_line_breaks_stay_on_the_line() -> None:
    line = line_of("two\nlines", extra={"odd": {1, 2}.__class__}, error=True)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == "two\nlines"
    assert "Overloaded: no room" in fields["traceback"]
