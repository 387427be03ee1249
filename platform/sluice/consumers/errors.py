"""Error replies of the platform itself, in the shape that OpenAI's clients know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


def error_object(
    message: str, *, status: int = 404, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(message: str, *, status: int = 404, code: str | None = None) -> bytes:
    """The error object as JSON."""
    return msgspec.json.encode(error_object(message, status=status, code=code))


class HttpError(Exception):
    """Raised by a handler before it has sent anything: becomes this reply.

    Args:
        retry_after: seconds, for 429 and 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after
        self.extra_headers = tuple(headers)

    def payload(self) -> dict[str, Any]:
        return error_object(self.message, status=self.status, code=self.code)

    def headers(self) -> list[tuple[bytes, bytes]]:
        out = list(self.extra_headers)
        if self.retry_after is not None:
            out.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        return out


def draining(retry_after: float) -> HttpError:
    """The refusal of new inference while the server leaves."""
    return HttpError(
        503,
        "This server is shutting down; try again, on another one.",
        code="shutting_down",
        retry_after=retry_after,
        headers=[(b"connection", b"close")],
    )
