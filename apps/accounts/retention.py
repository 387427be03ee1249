"""How long text and credentials are kept, and what deletes them when their time has passed.

Text in Redis goes by itself (with its request, or by TTL). What is in the database is
deleted here: by ``manage.py purge``, and by every server once an hour.
"""

from __future__ import annotations

from datetime import timedelta

from django.contrib.sessions.models import Session
from django.utils import timezone

from apps.accounts.models import Ticket
from apps.api.models import KeptResponse
from apps.chat.models import Conversation

_PAGE = 500


def purge(older_than_days: float = 0) -> dict[str, int]:
    """Delete what is past its time; gives how many rows of each kind went.

    ``older_than_days``: also conversations that nobody has touched for so long; 0 keeps them.
    """
    now = timezone.now()
    gone = {
        "kept responses": KeptResponse.objects.expired().delete()[0],
        "sessions": Session.objects.filter(expire_date__lt=now).delete()[0],
        "WebSocket tickets": Ticket.objects.filter(expires_at__lt=now).delete()[0],
    }
    if older_than_days > 0:
        gone["conversations"] = _conversations(now - timedelta(days=older_than_days))
    return gone


def _conversations(before: object) -> int:
    """In pages, so that no other writer waits long."""
    count = 0
    while ids := list(Conversation.objects.filter(updated_at__lt=before).values_list("pk", flat=True)[:_PAGE]):
        # Asked again: one that has just been written to stays.
        Conversation.objects.filter(pk__in=ids, updated_at__lt=before).delete()
        count += len(ids)
    return count
