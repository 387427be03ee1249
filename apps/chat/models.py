"""Conversations, their messages as a tree, and saved presets.

A message's parent is the message before it; two messages with one parent are
branches of each other. A conversation's ``leaf`` is the end of the branch that
is shown.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

TITLE_LENGTH = 120
TEXT_LIMIT = 200_000
"""Longest text that one message takes, in characters."""


class ConversationQuerySet(models.QuerySet["Conversation"]):
    def for_user(self, user: Any) -> ConversationQuerySet:
        """Only what belongs to ``user``; every view and consumer starts here."""
        return self.filter(user=user)

    def matching(self, query: str) -> ConversationQuerySet:
        """Title or any message contains every word of ``query``, whatever the case."""
        found = self
        for word in query.split()[:8]:
            # SQLite's LIKE knows the case of Latin letters without accents only.
            lookup, value = ("icontains", word) if word.isascii() else ("iregex", re.escape(word))
            inside = Message.objects.filter(conversation=models.OuterRef("pk"), **{f"text__{lookup}": value})
            found = found.filter(Q(**{f"title__{lookup}": value}) | models.Exists(inside))
        return found

    def listed(self) -> ConversationQuerySet:
        return self.order_by("-pinned", "-updated_at", "id")


class Conversation(models.Model):
    """One thread of one user.

    ``settings`` holds model, system, temperature, top_p and max_tokens, each
    absent where the user left the default.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="conversations")
    title = models.CharField(max_length=TITLE_LENGTH, blank=True)
    pinned = models.BooleanField(default=False)
    settings = models.JSONField(default=dict, blank=True)
    leaf = models.ForeignKey("Message", on_delete=models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(default=timezone.now, db_index=True)

    objects = ConversationQuerySet.as_manager()

    class Meta:
        indexes = [models.Index(fields=["user", "-pinned", "-updated_at"], name="chat_list")]

    def __str__(self) -> str:
        return self.title or str(self.id)

    def path(self) -> list[Message]:
        """The shown branch, first message first."""
        by_id = {message.id: message for message in self.messages.all()}
        return branch(by_id, self.leaf_id)


class Message(models.Model):
    """One turn. A user's turn is always complete; an answer passes through ``State``.

    Attributes:
        client_ref: the sender's own id of the send, so that a repeated send
            (double click, reconnect) finds what the first one made.
        request_id: the generation that writes this answer, or wrote it last.
        seq: frames of that request that ``text`` already contains.
        reason: why an answer ended: stop, length, user, left, error ...
        hold_until: a page that shows this answer is on its way; keep generating.
    """

    class Role(models.TextChoices):
        USER = "user"
        ASSISTANT = "assistant"

    class State(models.TextChoices):
        STREAMING = "streaming"
        COMPLETE = "complete"
        STOPPED = "stopped"
        FAILED = "failed"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    conversation = models.ForeignKey(Conversation, on_delete=models.CASCADE, related_name="messages")
    parent = models.ForeignKey("self", on_delete=models.CASCADE, null=True, blank=True, related_name="children")
    role = models.CharField(max_length=9, choices=Role.choices)
    text = models.TextField(blank=True)
    state = models.CharField(max_length=9, choices=State.choices, default=State.COMPLETE, db_index=True)
    reason = models.CharField(max_length=24, blank=True)
    error = models.CharField(max_length=500, blank=True)
    error_code = models.CharField(max_length=40, blank=True)
    client_ref = models.CharField(max_length=64, blank=True)
    request_id = models.CharField(max_length=64, blank=True)
    seq = models.PositiveIntegerField(default=0)
    model = models.CharField(max_length=120, blank=True)
    prompt_tokens = models.PositiveIntegerField(default=0)
    generated_tokens = models.PositiveIntegerField(default=0)
    ttft_ms = models.PositiveIntegerField(null=True, blank=True)
    tokens_per_second = models.FloatField(null=True, blank=True)
    hold_until = models.DateTimeField(null=True, blank=True)
    touched_at = models.DateTimeField(default=timezone.now)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["created_at", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["conversation", "client_ref", "role"],
                condition=~Q(client_ref=""),
                name="chat_one_message_per_send",
            )
        ]

    def __str__(self) -> str:
        return f"{self.role} {self.id}"

    @property
    def streaming(self) -> bool:
        return self.state == self.State.STREAMING


class Preset(models.Model):
    """A user's saved settings under a name."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="chat_presets")
    name = models.CharField(max_length=60)
    settings = models.JSONField(default=dict)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["user", "name"], name="chat_preset_name")]

    def __str__(self) -> str:
        return self.name


def branch(by_id: dict[uuid.UUID, Message], leaf: uuid.UUID | None) -> list[Message]:
    """From the root to ``leaf`` through the parents; a cycle ends it."""
    path: list[Message] = []
    seen: set[uuid.UUID] = set()
    while leaf is not None and leaf in by_id and leaf not in seen:
        seen.add(leaf)
        path.append(by_id[leaf])
        leaf = by_id[leaf].parent_id
    path.reverse()
    return path


def deepest(messages: Iterable[Message], start: uuid.UUID) -> uuid.UUID:
    """The end of the branch through ``start``, taking the newest child at each fork."""
    newest: dict[uuid.UUID | None, Message] = {}
    for message in messages:
        held = newest.get(message.parent_id)
        if held is None or (message.created_at, message.id) >= (held.created_at, held.id):
            newest[message.parent_id] = message
    leaf, seen = start, {start}
    while (child := newest.get(leaf)) is not None and child.id not in seen:
        leaf = child.id
        seen.add(leaf)
    return leaf
