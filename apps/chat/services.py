"""Conversations, their settings and presets, with the rules that guard every change.

All functions are synchronous and take the user they act for; what belongs to
somebody else does not exist for them. Views call them directly, the consumer
through ``database_sync_to_async``.
"""

from __future__ import annotations

import uuid
from typing import Any

from apps.chat.models import TITLE_LENGTH, Conversation, Message, Preset, deepest

SYSTEM_LIMIT = 20_000
PRESETS_PER_USER = 50
BUILT_IN_PRESETS = ("Default", "Precise", "Balanced", "Creative")
"""Those of the page (``settings.js``); nobody's own has such a name, however it is written."""


class ChatError(Exception):
    """A request that makes no sense; ``code`` is for programs, the text for people."""

    def __init__(self, message: str, code: str = "invalid", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Missing(ChatError):
    """Not there, or not this user's."""

    def __init__(self, what: str = "conversation") -> None:
        super().__init__(f"There is no such {what}.", "not_found", 404)


def parse_id(value: Any, what: str = "conversation") -> uuid.UUID:
    try:
        return uuid.UUID(str(value))
    except ValueError:
        raise Missing(what) from None


def get_conversation(user: Any, conversation_id: Any) -> Conversation:
    found = Conversation.objects.for_user(user).filter(id=parse_id(conversation_id)).first()
    if found is None:
        raise Missing
    return found


def get_message(user: Any, message_id: Any) -> Message:
    found = (
        Message.objects.filter(id=parse_id(message_id, "message"), conversation__user=user)
        .select_related("conversation")
        .first()
    )
    if found is None:
        raise Missing("message")
    return found


def clean_settings(values: Any) -> dict[str, Any]:
    """Check a conversation's settings; absent and null both mean the default.

    Raises:
        ChatError: an unknown name, a wrong type or a value out of range.
    """
    if not isinstance(values, dict):
        raise ChatError("Settings must be an object.")
    clean: dict[str, Any] = {}
    for name, value in values.items():
        if name not in ("model", "system", "temperature", "top_p", "max_tokens"):
            raise ChatError(f"There is no setting {str(name)[:40]!r}.")
        if value is None or value == "":
            continue
        clean[name] = _clean_setting(name, value)
    return clean


def _clean_setting(name: str, value: Any) -> Any:
    if name in ("model", "system"):
        limit = 120 if name == "model" else SYSTEM_LIMIT
        if not isinstance(value, str) or len(value) > limit:
            raise ChatError(f"{name} must be text of at most {limit:,} characters.")
        return value.replace("\x00", "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ChatError(f"{name} must be a number.")
    if name == "max_tokens":
        if value != int(value) or not 1 <= value <= 1_000_000:
            raise ChatError("max_tokens must be a whole number of at least 1.")
        return int(value)
    top = 2 if name == "temperature" else 1
    if not 0 <= value <= top:
        raise ChatError(f"{name} must lie between 0 and {top}.")
    return float(value)


def create_conversation(user: Any, settings: Any = None) -> Conversation:
    return Conversation.objects.create(user=user, settings=clean_settings(settings or {}))


def update_conversation(user: Any, conversation_id: Any, changes: dict[str, Any]) -> Conversation:
    """Rename, pin, set settings, or show another branch (``leaf``: any message of it)."""
    conversation = get_conversation(user, conversation_id)
    fields: list[str] = []
    if "title" in changes:
        title = _one_line(changes["title"], TITLE_LENGTH)
        if not title:
            raise ChatError("A title needs at least one character.")
        conversation.title = title
        fields.append("title")
    if "pinned" in changes:
        if not isinstance(changes["pinned"], bool):
            raise ChatError("pinned must be true or false.")
        conversation.pinned = changes["pinned"]
        fields.append("pinned")
    if "settings" in changes:
        conversation.settings = clean_settings(changes["settings"])
        fields.append("settings")
    if "leaf" in changes:
        messages = list(conversation.messages.all())
        start = parse_id(changes["leaf"], "message")
        if start not in {message.id for message in messages}:
            raise Missing("message")
        conversation.leaf_id = deepest(messages, start)
        fields.append("leaf")
    if not fields:
        raise ChatError("Nothing to change: give title, pinned, settings or leaf.")
    conversation.save(update_fields=fields)
    return conversation


def _one_line(value: Any, limit: int) -> str:
    # PostgreSQL stores no NUL in a text.
    return " ".join(str(value).replace("\x00", "").split())[:limit]


def save_preset(user: Any, name: Any, settings: Any) -> Preset:
    name = _one_line(name or "", 60)
    if not name:
        raise ChatError("A preset needs a name.")
    if name.casefold() in (built_in.casefold() for built_in in BUILT_IN_PRESETS):
        raise ChatError("A built-in preset has this name; choose another one.")
    values = clean_settings(settings)
    preset = Preset.objects.filter(user=user, name=name).first()
    if preset is None and Preset.objects.filter(user=user).count() >= PRESETS_PER_USER:
        raise ChatError(f"There are already {PRESETS_PER_USER} presets; delete one first.")
    preset, _ = Preset.objects.update_or_create(user=user, name=name, defaults={"settings": values})
    return preset


def delete_preset(user: Any, preset_id: Any) -> None:
    deleted, _ = Preset.objects.filter(user=user, id=preset_id).delete()
    if not deleted:
        raise Missing("preset")
