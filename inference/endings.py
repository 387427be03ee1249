"""The one log line of a request, written by the process that ended it: figures, never text."""

from __future__ import annotations

import logging

from inference.lifecycle import Reason, State
from inference.messages import Ending

logger = logging.getLogger("sluice.request")

_WARNED = frozenset({Reason.DEADLINE, Reason.SHUTDOWN})


def level_of(ending: Ending) -> int:
    """ERROR for what failed, WARNING for what ran out of time, INFO for the rest."""
    if ending.state == State.FAILED:
        return logging.ERROR
    return logging.WARNING if ending.reason in _WARNED else logging.INFO


def log_ending(ending: Ending, *, exchange: str = "") -> None:
    """Log how a request ended. ``exchange`` is the id of the HTTP or WebSocket exchange it came by."""
    logger.log(
        level_of(ending),
        "request %s ended: %s(%s), %d + %d tokens in %.2f s",
        ending.id,
        ending.state,
        ending.reason,
        ending.prompt_tokens,
        ending.generated_tokens,
        (ending.ended_ms - ending.created_ms) / 1000,
        extra={
            "event": "request_ended",
            "id": ending.id,
            "request_id": exchange or "-",
            "endpoint": ending.endpoint,
            "transport": ending.transport,
            "model": ending.model,
            "outcome": ending.state,
            "reason": ending.reason,
            "owner": ending.owner,
            "worker": ending.worker or None,
            "attempts": ending.attempts,
            "prompt_tokens": ending.prompt_tokens,
            "generated_tokens": ending.generated_tokens,
            "queue_ms": _since(ending, ending.claimed_ms),
            "ttft_ms": _since(ending, ending.first_token_ms),
            "duration_ms": ending.ended_ms - ending.created_ms,
        },
    )


def _since(ending: Ending, at: int) -> int | None:
    return at - ending.created_ms if at else None
