"""The end of a request as its server tells it: one log line of figures, never text."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from inference.lifecycle import Outcome, Reason, State
from inference.messages import Ending

if TYPE_CHECKING:
    from inference.gateway.stream import RequestStream
    from inference.store.records import Submission

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


def lost_ending(stream: RequestStream, spec: Submission, *, server: str, by: str) -> Ending:
    """The summary of a request that Redis has lost, from what its reader saw of it."""
    outcome = stream.outcome or Outcome.failed(Reason.STATE_LOST)
    offset = stream.created_ms - stream.began * 1000
    return Ending(
        id=stream.id,
        model=spec.job.model,
        state=outcome.state,
        reason=outcome.reason,
        endpoint=spec.endpoint,
        transport=spec.transport,
        owner=spec.owner,
        server=server,
        worker="",
        attempts=stream.attempt,
        prompt_tokens=len(spec.job.prompt_ids),
        generated_tokens=stream.tokens,
        created_ms=stream.created_ms,
        claimed_ms=0,
        first_token_ms=round(offset + stream.first_token * 1000) if stream.first_token else 0,
        ended_ms=round(offset + time.monotonic() * 1000),
        by=by,
    )
