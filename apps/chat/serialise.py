"""Conversations and messages as the page sees them, and as files."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.db.models import F

from apps.chat.live import complete_content
from apps.chat.models import Conversation, Message, branch
from apps.chat.turns import is_cut


def conversation_json(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": str(conversation.id),
        "title": conversation.title or "New chat",
        "pinned": conversation.pinned,
        "settings": conversation.settings,
        "updated_at": conversation.updated_at.isoformat(),
        "leaf": str(conversation.leaf_id) if conversation.leaf_id else None,
    }


def message_json(message: Message, siblings: list[str] | None = None) -> dict[str, Any]:
    """One message; ``content`` (see ``live``) only for answers that no longer change."""
    answer = message.role == Message.Role.ASSISTANT
    return {
        "id": str(message.id),
        "conversation": str(message.conversation_id),
        "parent": str(message.parent_id) if message.parent_id else None,
        "role": message.role,
        "ref": message.client_ref,
        "text": message.text,
        "content": complete_content(message.text) if answer and not message.streaming else None,
        "state": message.state,
        "reason": message.reason,
        "cut": answer and is_cut(message),
        "error": message.error,
        "code": message.error_code,
        "model": message.model,
        "stats": {
            "prompt_tokens": message.prompt_tokens,
            "generated_tokens": message.generated_tokens,
            "ttft_ms": message.ttft_ms,
            "tokens_per_second": message.tokens_per_second,
        },
        "siblings": siblings or [str(message.id)],
        "created_at": message.created_at.isoformat(),
    }


def sibling_ids(message: Message) -> list[str]:
    found = Message.objects.filter(conversation_id=message.conversation_id, parent_id=message.parent_id)
    return [str(pk) for pk in found.values_list("id", flat=True)]


def detail_json(conversation: Conversation) -> dict[str, Any]:
    """A conversation with the messages of the shown branch, each with its siblings."""
    # Both by one look: a branch that was begun since the conversation was read would be there, but not shown.
    messages = list(conversation.messages.annotate(shown=F("conversation__leaf")))
    if messages:
        conversation.leaf_id = messages[0].shown
    families: dict[Any, list[str]] = defaultdict(list)
    for message in messages:
        families[message.parent_id].append(str(message.id))
    path = branch({message.id: message for message in messages}, conversation.leaf_id)
    return {
        "conversation": conversation_json(conversation),
        "messages": [message_json(message, families[message.parent_id]) for message in path],
    }


def export_json(conversation: Conversation) -> dict[str, Any]:
    """All branches, for reading by programs."""
    return {
        "format": "sluice-conversation",
        "version": 1,
        **conversation_json(conversation),
        "created_at": conversation.created_at.isoformat(),
        "messages": [
            {
                "id": str(message.id),
                "parent": str(message.parent_id) if message.parent_id else None,
                "role": message.role,
                "text": message.text,
                "state": message.state,
                "reason": message.reason,
                "model": message.model,
                "prompt_tokens": message.prompt_tokens,
                "generated_tokens": message.generated_tokens,
                "created_at": message.created_at.isoformat(),
            }
            for message in conversation.messages.all()
        ],
    }


def export_markdown(conversation: Conversation) -> str:
    """The shown branch, for reading by people."""
    parts = [f"# {conversation.title or 'New chat'}", f"*{conversation.created_at:%Y-%m-%d %H:%M} UTC*"]
    if system := conversation.settings.get("system"):
        parts += ["## System", system]
    for message in conversation.path():
        if message.role == Message.Role.USER:
            parts.append("## You")
        else:
            parts.append(f"## {message.model or 'Assistant'}")
        parts.append(message.text)
        if is_cut(message):
            parts.append("*(This answer was cut off.)*")
    return "\n\n".join(parts) + "\n"
