"""The row of an answer while it is being written: who may write it, and what holds it open.

Every function is one statement whose condition decides, so that of two processes
that write the same answer one wins and the other learns it.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from django.utils import timezone

from apps.chat.models import Conversation, Message

HOLD_SECONDS = 10.0
"""How long a page that has just been asked for may take to come back to its stream."""

State = Message.State


def streaming_answers(conversation: Conversation) -> list[Message]:
    return list(conversation.messages.filter(state=State.STREAMING))


def hold(conversation_id: uuid.UUID) -> None:
    """A page that shows this conversation is on its way: let its answers go on meanwhile."""
    Message.objects.filter(conversation_id=conversation_id, state=State.STREAMING).update(
        hold_until=timezone.now() + timedelta(seconds=HOLD_SECONDS)
    )


def unhold(message_id: uuid.UUID) -> None:
    """The page has come."""
    Message.objects.filter(id=message_id, hold_until__isnull=False).update(hold_until=None)


def held(message_id: uuid.UUID) -> bool:
    return Message.objects.filter(id=message_id, hold_until__gt=timezone.now()).exists()


def begin_request(message_id: uuid.UUID, request_id: str) -> None:
    Message.objects.filter(id=message_id).update(request_id=request_id, seq=0, touched_at=timezone.now())


def checkpoint(message_id: uuid.UUID, request_id: str, seq: int, **fields: Any) -> bool:
    """Save what has come so far. False where another process now writes this answer, or it has ended."""
    return bool(
        Message.objects.filter(id=message_id, request_id=request_id, state=State.STREAMING, seq__lte=seq).update(
            seq=seq, touched_at=timezone.now(), **fields
        )
    )


def abandon(message_id: uuid.UUID, request_id: str) -> None:
    """The writer stops although the answer goes on: whoever shows it next takes it over at once."""
    Message.objects.filter(id=message_id, request_id=request_id, state=State.STREAMING).update(
        touched_at=timezone.now() - timedelta(hours=1)
    )


def finish(message_id: uuid.UUID, request_id: str, **fields: Any) -> bool:
    """Write an answer's end, once: whoever comes second changes nothing."""
    return bool(
        Message.objects.filter(id=message_id, request_id=request_id, state=State.STREAMING).update(
            touched_at=timezone.now(), hold_until=None, **fields
        )
    )
