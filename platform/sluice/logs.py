"""Request ids, how they get into each log line, and what a line says of a refused request."""

from __future__ import annotations

import logging
import re
import secrets

from inference.logs import request_id

_ACCEPTED = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")


def new_request_id() -> str:
    return "req-" + secrets.token_hex(12)


def clean_request_id(raw: bytes | None) -> str:
    """The client's ``X-Request-ID`` where it is harmless in a log and a header, else a new one."""
    if raw:
        text = raw.decode("latin-1").strip()
        if _ACCEPTED.match(text):
            return text
    return new_request_id()


class RequestIdFilter(logging.Filter):
    """Gives each record ``request_id``, so that the format can name it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        return True


class RefusedFilter(logging.Filter):
    """Makes one warning of what Django says of a request that it refused (an unknown Host, too many fields).

    Such a request is its client's doing, and Django logs it as an error with its stack: thirty lines for each
    that a stranger sends.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("django.security."):
            record.exc_info = record.exc_text = None
            if record.levelno > logging.WARNING:
                record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return True
