"""Exceptions of the core, named by what the caller should do about them.

Driver errors (redis, torch, OS) are translated once, at the edge where they
arise, and keep their cause.
"""

from __future__ import annotations


class SluiceError(Exception):
    """Root of every exception that ``inference`` raises on purpose."""


class ConfigError(SluiceError):
    """A setting is missing or malformed; the message names it and the mend."""


class StoreUnavailable(SluiceError):
    """Redis did not answer. The operation may or may not have been applied; retry it."""


class Refused(SluiceError):
    """A request that was never accepted and therefore left nothing behind.

    Attributes:
        retry_after: seconds after which the same request is likely to be
            accepted, or ``None`` where repeating it is pointless.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(Refused):
    """The queue (or the caller's own share of it) is full: come back later."""


class NotServing(Refused):
    """No worker serves the model, or this server is draining: try another server or later."""


class TooLarge(Refused):
    """Prompt and answer can never fit the model's context or the engine's cache."""


class UnknownModel(Refused):
    """The alias names no configured model."""


class NotFound(SluiceError):
    """No request of that id is alive or retained."""


class ModelUnavailable(SluiceError):
    """Model files are missing, corrupt or unreadable; the message names the mend."""


class EngineDied(SluiceError):
    """The engine's loop has ended and cannot go on; the worker process must exit."""


class UpstreamError(SluiceError):
    """An OpenAI-compatible upstream failed or answered nonsense for one request."""
