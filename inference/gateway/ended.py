"""Why a reader gets no more of its stream although the last frame has not come."""

from __future__ import annotations

from inference.errors import SluiceError
from inference.lifecycle import Outcome, Reason

_SENTENCES = {
    Reason.USER: "The request was cancelled.",
    Reason.ADMIN: "The request was cancelled by an operator.",
    Reason.DEADLINE: "The request did not finish within its time limit.",
    Reason.SHUTDOWN: "The server is shutting down.",
    Reason.CLIENT_GONE: "The request was given up because its client went away.",
    Reason.WORKER_LOST: "The worker generating this answer was lost and it could not be continued.",
    Reason.STATE_LOST: "The state of this request was lost.",
    Reason.ENGINE_ERROR: "The engine failed on this request.",
}


class RequestEnded(SluiceError):
    """The request was ended by somebody other than its reader; ``outcome`` says how."""

    def __init__(self, outcome: Outcome, message: str = "") -> None:
        super().__init__(message or _SENTENCES.get(outcome.reason, str(outcome)))
        self.outcome = outcome


class Detached(SluiceError):
    """This reader is done although the request goes on: re-attach to it.

    ``superseded`` tells a newer reader (true) from a server that shuts down (false).
    """

    def __init__(self, message: str, *, superseded: bool) -> None:
        super().__init__(message)
        self.superseded = superseded
