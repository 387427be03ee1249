"""The format of log lines, the same for every process: one line per event, text or JSON."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Any

import msgspec

#: The id of the exchange that this task serves; "-" outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="-")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (ISO, UTC), level, logger, message and the record's extras."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD and v is not None})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class LineFormatter(logging.Formatter):
    """For people: time, level, who, sentence; in a server the exchange that it is about stands beside who."""

    def __init__(self, who: str = "") -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(whose)s%(message)s", "%Y-%m-%d %H:%M:%S")
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        exchange = getattr(record, "request_id", "-")
        words = [word for word in (self._who, exchange if exchange != "-" else "") if word]
        record.whose = f"[{' '.join(words)}] " if words else ""
        return super().format(record)


def configure(who: str) -> None:
    """Set up the root logger of a process; ``SLUICE_LOG_FORMAT`` is ``text`` (default) or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("SLUICE_LOG_FORMAT", "text") == "json"
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(who))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("SLUICE_LOG_LEVEL", "INFO").upper())
    for noisy in ("httpx", "urllib3", "transformers", "filelock", "ContinuousBatchingLogger"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
