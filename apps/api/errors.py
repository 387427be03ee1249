"""Every error a client can get, as OpenAI's error object with its HTTP status.

A request fails in one of three ways: it was wrong (4xx, repeating it changes
nothing), the service cannot take it now (429 or 503, with ``Retry-After``), or
its generation broke after it had been accepted. The first two are decided
before any header goes out; the third is an event in the stream, or the body of
a plain answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from apps.accounts.limits import LimitExceeded
from inference.errors import NotServing, Overloaded, Refused, StoreUnavailable, TooLarge, UnknownModel
from inference.gateway import Detached
from inference.lifecycle import Outcome, Reason

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
MAX_MESSAGE = 400


class ApiError(Exception):
    """An answer other than the one the client hoped for.

    Attributes:
        status: HTTP status, where no header has gone out yet.
        message: one sentence, without any text of the request's prompt.
        type: OpenAI's class of the error.
        param: the field that is at fault, or ``None``.
        code: a stable word for programs, or ``None``.
        retry_after: seconds, for 429 and 503.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        self.type = type or TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = param if param is None or len(param) <= MAX_MESSAGE else param[: MAX_MESSAGE - 3] + "..."
        self.code = code
        self.retry_after = retry_after
        self.extra_headers = headers

    def payload(self) -> dict[str, Any]:
        """The error object, ready to be encoded."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return msgspec.json.encode(self.payload())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers besides length and connection."""
        out = [(b"content-type", b"application/json"), *self.extra_headers]
        if self.retry_after is not None:
            out.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        return out


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(alias: str) -> ApiError:
    """The 404 for a name that is not served here, or not to this caller."""
    shown = alias if len(alias) <= 100 else alias[:97] + "..."
    return ApiError(
        404,
        f"The model {shown!r} does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def unknown_request(request_id: str) -> ApiError:
    """The 404 for a request that is not alive, or not the caller's to see."""
    shown = request_id if len(request_id) <= 100 else request_id[:97] + "..."
    return ApiError(404, f"There is no request {shown!r}.", param="id", code="request_not_found")


def from_refusal(
    exc: Refused | StoreUnavailable, model: str, retry_after: float, prompt_as: str | None = None
) -> ApiError:
    """Translate what the core says before it accepts a request.

    Args:
        retry_after: seconds to suggest where the exception itself names none.
        prompt_as: the field in which the caller gave the prompt.
    """
    if isinstance(exc, StoreUnavailable):
        return ApiError(
            503,
            "The service cannot reach its request store at the moment.",
            code="store_unavailable",
            retry_after=retry_after,
        )
    wait = exc.retry_after if exc.retry_after is not None else retry_after
    if isinstance(exc, Overloaded):
        return ApiError(429, str(exc), code="overloaded", retry_after=wait)
    if isinstance(exc, NotServing):
        return ApiError(503, str(exc), code="model_unavailable", retry_after=wait)
    if isinstance(exc, UnknownModel):
        return unknown_model(model)
    if isinstance(exc, TooLarge):
        return invalid(str(exc), prompt_as, "context_length_exceeded")
    return ApiError(503, str(exc), code="refused", retry_after=wait)


def over_limit(exc: LimitExceeded, asked_as: str | None = None) -> ApiError:
    """The caller's own limits: 429 with the wait, or 400 where waiting would not help.

    Args:
        asked_as: the field that says how long an answer may be.
    """
    if exc.retry_after is None:
        param = asked_as if exc.limit == "max_tokens" else None
        return ApiError(400, str(exc), param=param, code="limit_exceeded", headers=header_pairs(exc.headers))
    return ApiError(
        429,
        str(exc),
        code="rate_limit_exceeded",
        retry_after=exc.retry_after,
        headers=header_pairs(exc.headers),
    )


def header_pairs(headers: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.lower().encode(), str(value).encode()) for name, value in headers.items())


_ENDINGS: dict[Reason, tuple[int, str, str]] = {
    Reason.CLIENT_GONE: (499, "client_gone", "The client closed the connection."),
    Reason.USER: (409, "cancelled", "The request was cancelled by its owner."),
    Reason.ADMIN: (409, "cancelled", "The request was cancelled by an operator."),
    Reason.DEADLINE: (408, "deadline_exceeded", "The request's timeout passed before its answer was complete."),
    Reason.SHUTDOWN: (503, "shutting_down", "The server is shutting down."),
    Reason.WORKER_LOST: (500, "worker_lost", "The worker was lost, and so were its replacements."),
    Reason.ENGINE_ERROR: (500, "engine_error", "The engine failed on this request."),
    Reason.STATE_LOST: (503, "state_lost", "The state of the request was lost."),
}


def from_outcome(outcome: Outcome, message: str = "") -> ApiError:
    """The error for a request that ended before its answer was complete."""
    status, code, text = _ENDINGS.get(outcome.reason, (500, str(outcome.reason), "The request has ended."))
    return ApiError(
        status,
        message or text,
        code=code,
        type="server_error" if status >= 500 or status in (409, 499) else None,
        retry_after=1.0 if status == 503 else None,
    )


def from_detached(detached: Detached) -> ApiError:
    """Another reader has taken the stream over, or another server will go on with it.

    The codes differ, as clients attach again after ``detached``: two readers would take the
    stream from each other for ever.
    """
    if detached.superseded:
        return ApiError(409, str(detached), code="superseded")
    return ApiError(
        503,
        "This server is letting go of the stream; attach to the request again.",
        code="detached",
        retry_after=1.0,
    )
