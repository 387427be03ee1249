"""The states of a request and the only moves between them.

::

    queued -> running -> finished(stop | length | tool_calls)
       \\________\\______-> cancelled(client_gone | user | admin | deadline | shutdown)
                        -> failed(worker_lost | engine_error | state_lost)
    running -> queued     (its worker was lost; it continues elsewhere)

The moves themselves are made by the Lua scripts in ``store/lua`` - this module
names them, so that every layer speaks of endings with the same words.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class State(StrEnum):
    """Where a request stands. The last three are terminal."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Reason(StrEnum):
    """Why a request ended; carried as a value from where it arose to log, metric and reply."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CLIENT_GONE = "client_gone"
    USER = "user"
    ADMIN = "admin"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    WORKER_LOST = "worker_lost"
    ENGINE_ERROR = "engine_error"
    STATE_LOST = "state_lost"


REASONS: dict[State, frozenset[Reason]] = {
    State.FINISHED: frozenset({Reason.STOP, Reason.LENGTH, Reason.TOOL_CALLS}),
    State.CANCELLED: frozenset({Reason.CLIENT_GONE, Reason.USER, Reason.ADMIN, Reason.DEADLINE, Reason.SHUTDOWN}),
    State.FAILED: frozenset({Reason.WORKER_LOST, Reason.ENGINE_ERROR, Reason.STATE_LOST}),
}


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How a request ended: a terminal state and the reason for it.

    Raises:
        ValueError: where the reason does not belong to the state.
    """

    state: State
    reason: Reason

    def __post_init__(self) -> None:
        allowed = REASONS.get(self.state)
        if allowed is None or self.reason not in allowed:
            expected = sorted(allowed) if allowed else "a terminal state"
            raise ValueError(f"{self.state}({self.reason}) is no ending; expected {expected}")

    @classmethod
    def finished(cls, reason: str) -> Outcome:
        return cls(State.FINISHED, Reason(reason))

    @classmethod
    def cancelled(cls, reason: Reason) -> Outcome:
        return cls(State.CANCELLED, reason)

    @classmethod
    def failed(cls, reason: Reason) -> Outcome:
        return cls(State.FAILED, reason)

    def __str__(self) -> str:
        return f"{self.state}({self.reason})"
