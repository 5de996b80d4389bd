"""Logging of the daemons: one line a record on stderr, for people or (``--log-json``) for machines.

Passwords in URLs never reach the log, whatever put them there.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from timeslice.addresses import redact_url
from timeslice.errors import printable

LEVELS = ("debug", "info", "warning", "error")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(*, as_json: bool = False, level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logging of this process to ``stream`` (default stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if as_json else _Plain())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as ``extra=``: group, job, node, token."""
    return {name: value for name, value in vars(record).items() if name not in _OWN}


def _clean(text: str) -> str:
    """Without passwords. Line by line: what is hidden reaches to the last @, which may stand far behind."""
    return "\n".join(redact_url(line) for line in text.split("\n"))


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        where = "".join(f" {name}={value}" for name, value in _extra(record).items())
        line = f"{_when(record)} {record.levelname.lower():7} {record.name}: {record.getMessage()}{where}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return printable(_clean(line))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "at": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        clean = {name: _clean(value) if isinstance(value, str) else value for name, value in entry.items()}
        return json.dumps(clean, default=lambda value: _clean(str(value)))
