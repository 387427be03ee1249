"""Where this server process stands between start and exit, as everybody may read it."""

from __future__ import annotations

import time
from enum import StrEnum


class ServerState(StrEnum):
    """``serving -> pausing -> refusing -> finishing -> ending``, then exit 0."""

    SERVING = "serving"
    PAUSING = "pausing"
    REFUSING = "refusing"
    FINISHING = "finishing"
    ENDING = "ending"


_ORDER = list(ServerState)


class ServerStatus:
    """One per process; changed by the drain only."""

    def __init__(self) -> None:
        self.state = ServerState.SERVING
        #: ``time.monotonic()`` at which the drain must be over, where one runs.
        self.deadline: float | None = None

    def move(self, state: ServerState, *, undo: bool = False) -> None:
        """Change the state. Only an undone drain may go back.

        Raises:
            ValueError: a move backwards without ``undo``.
        """
        if not undo and _ORDER.index(state) < _ORDER.index(self.state):
            raise ValueError(f"a draining server cannot go from {self.state} back to {state}")
        self.state = state

    @property
    def leaving(self) -> bool:
        """A drain has begun: readiness is false and connections are not kept alive."""
        return self.state is not ServerState.SERVING

    @property
    def refusing(self) -> bool:
        """New inference is not accepted any more."""
        return self.state not in (ServerState.SERVING, ServerState.PAUSING)

    def seconds_left(self) -> float | None:
        """Seconds until the running drain must be over; ``None`` where none runs."""
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - time.monotonic())

    def retry_after(self) -> int:
        """Whole seconds after which a refused client should try again: when we are gone and replaced."""
        return max(1, min(60, round(self.seconds_left() or 0) + 1))
