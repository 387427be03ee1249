"""What the API keeps in the database: responses that may be continued."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.db import models
from django.utils import timezone


class KeptResponseQuerySet(models.QuerySet["KeptResponse"]):
    """Kept responses, by what is asked of them."""

    def current(self) -> KeptResponseQuerySet:
        found: KeptResponseQuerySet = self.filter(expires_at__gt=timezone.now())
        return found

    def expired(self) -> KeptResponseQuerySet:
        found: KeptResponseQuerySet = self.filter(expires_at__lte=timezone.now())
        return found


class KeptResponse(models.Model):
    """A response and the conversation that led to it; goes away by itself.

    ``conversation`` holds chat messages, the answer included, without the
    request's own instructions.
    """

    id = models.CharField(primary_key=True, max_length=64)
    owner = models.CharField(max_length=64)
    expires_at = models.DateTimeField(db_index=True)
    # JSON as text: an answer may hold the character NUL, which JSON columns of PostgreSQL refuse.
    conversation = models.TextField()
    response = models.TextField()

    objects = KeptResponseQuerySet.as_manager()

    def __str__(self) -> str:
        return str(self.id)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat messages."""
        found: list[dict[str, Any]] = json.loads(self.conversation)
        return found

    def body(self) -> dict[str, Any]:
        """The response as it was answered."""
        found: dict[str, Any] = json.loads(self.response)
        return found


def keep(response_id: str, owner: str, conversation: list[Any], response: dict[str, Any], seconds: float) -> None:
    """Keep a response for so long, and clear away those whose time has passed."""
    KeptResponse.objects.expired().delete()
    KeptResponse.objects.create(
        id=response_id,
        owner=owner,
        expires_at=timezone.now() + timedelta(seconds=seconds),
        conversation=json.dumps(conversation),
        response=json.dumps(response),
    )


def find(response_id: str) -> KeptResponse | None:
    """A response that is still kept."""
    if not response_id.isprintable():
        return None  # PostgreSQL takes no NUL, and none of ours has anything of the kind
    kept: KeptResponse | None = KeptResponse.objects.current().filter(pk=response_id).first()
    return kept


def forget(response_id: str) -> None:
    KeptResponse.objects.filter(pk=response_id).delete()
