"""What can go wrong, by what the caller should do."""

from __future__ import annotations

from typing import Any


class SluiceClientError(Exception):
    """Root of this package's exceptions."""


class ConnectionLost(SluiceClientError):
    """The server could not be reached (again) in time, or does not let this client in."""


class GenerationError(SluiceClientError):
    """The server refused a generation, or could not complete it.

    Attributes:
        status: as an HTTP status. code, param: as in OpenAI's error object.
        retry_after: seconds, where trying again makes sense.
    """

    def __init__(self, message: dict[str, Any]) -> None:
        error = message.get("error", {})
        super().__init__(error.get("message", "The generation failed."))
        self.status: int = message.get("status", 500)
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.retry_after: float | None = message.get("retry_after")
