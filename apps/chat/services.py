"""Every change of a conversation, with the rules that guard it.

All functions are synchronous and take the user they act for; what belongs to
somebody else does not exist for them. Views call them directly, the consumer
through ``database_sync_to_async``.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from apps.chat.models import (
    TEXT_LIMIT,
    TITLE_LENGTH,
    Conversation,
    Message,
    Preset,
    deepest,
)

HOLD_SECONDS = 10.0
"""How long a page that has just been asked for may take to come back to its stream."""
SYSTEM_LIMIT = 20_000
PRESETS_PER_USER = 50

Role, State = Message.Role, Message.State


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


@dataclass(frozen=True)
class Turn:
    """What a send, edit, retry or continue has set up: the answer to generate."""

    conversation: Conversation
    answer: Message
    user_message: Message | None
    repeated: bool = False
    continues: bool = False


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
        return value
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
        title = " ".join(str(changes["title"]).split())[:TITLE_LENGTH]
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


def auto_title(text: str) -> str:
    """A title out of a first message: its first line with words, without Markdown marks."""
    for line in text.splitlines():
        line = re.sub(r"[`*_#>|\[\]]+", "", line)
        line = " ".join(line.split()).strip(" -:")
        if not line:
            continue
        if len(line) <= 60:
            return line
        return line[:60].rsplit(" ", 1)[0].rstrip(" ,;:.") + "…"
    return "New chat"


# --- turns ---------------------------------------------------------------------------------


def start_turn(user: Any, op: str, body: dict[str, Any], ref: str, model: str) -> Turn:
    """Set up the answer that ``op`` (send, edit, regenerate, continue) asks for.

    A ``ref`` seen before returns what it made then, so that sending twice is sending once.

    Raises:
        ChatError: the request makes no sense, or an answer is already being written there.
    """
    handlers = {"send": _send, "edit": _edit, "regenerate": _regenerate, "continue": _continue}
    if op not in handlers:
        raise ChatError(f"There is no operation {str(op)[:40]!r}.")
    if not ref or len(ref) > 64:
        raise ChatError("id must be text of 1 to 64 characters.")
    known = (
        Message.objects.filter(conversation__user=user, client_ref=ref, role=Role.ASSISTANT)
        .select_related("conversation", "parent")
        .first()
    )
    if known is not None:
        return Turn(known.conversation, known, known.parent, repeated=True)
    try:
        with transaction.atomic():
            return handlers[op](user, body, ref, model)
    except IntegrityError:
        # The same send by another path at the same moment: it has won, take what it made.
        known = Message.objects.select_related("conversation", "parent").get(
            conversation__user=user, client_ref=ref, role=Role.ASSISTANT
        )
        return Turn(known.conversation, known, known.parent, repeated=True)


def _text(body: dict[str, Any]) -> str:
    text = body.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ChatError("A message needs text.")
    if len(text) > TEXT_LIMIT:
        raise ChatError(f"A message takes at most {TEXT_LIMIT:,} characters.", "too_long")
    return text.strip("\n").replace("\x00", "")


def _send(user: Any, body: dict[str, Any], ref: str, model: str) -> Turn:
    text = _text(body)
    if body.get("conversation"):
        conversation = get_conversation(user, body["conversation"])
    else:
        conversation = create_conversation(user, body.get("settings"))
    parent = None
    if body.get("parent"):
        parent = conversation.messages.filter(id=parse_id(body["parent"], "message")).first()
        if parent is None or parent.role != Role.ASSISTANT:
            raise Missing("message")
        if parent.streaming:
            raise ChatError("The answer above is still being written.", "busy", 409)
    return _ask(conversation, parent, text, ref, model)


def _edit(user: Any, body: dict[str, Any], ref: str, model: str) -> Turn:
    original = get_message(user, body.get("message"))
    if original.role != Role.USER:
        raise ChatError("Only your own messages can be edited.")
    return _ask(original.conversation, original.parent, _text(body), ref, model)


def _ask(conversation: Conversation, parent: Message | None, text: str, ref: str, model: str) -> Turn:
    question = Message.objects.create(
        conversation=conversation, parent=parent, role=Role.USER, text=text, client_ref=ref
    )
    if not conversation.title:
        conversation.title = auto_title(text)
    return _answer(conversation, question, ref, model, question)


def _regenerate(user: Any, body: dict[str, Any], ref: str, model: str) -> Turn:
    old = get_message(user, body.get("message"))
    if old.role != Role.ASSISTANT or old.parent is None:
        raise ChatError("Only an answer can be written again.")
    if old.streaming:
        raise ChatError("This answer is still being written.", "busy", 409)
    if old.state == State.FAILED and not old.text:
        # Nothing worth a branch: the retry takes the failed answer's place.
        return _restart(old, ref, model)
    return _answer(old.conversation, old.parent, ref, model, None)


def _continue(user: Any, body: dict[str, Any], ref: str, model: str) -> Turn:
    cut = get_message(user, body.get("message"))
    if cut.role != Role.ASSISTANT or cut.streaming or not is_cut(cut):
        raise ChatError("Only an answer that was cut can be continued.")
    return _restart(cut, ref, model, continues=bool(cut.text))


def _restart(message: Message, ref: str, model: str, *, continues: bool = False) -> Turn:
    changed = (
        Message.objects.filter(id=message.id)
        .exclude(state=State.STREAMING)
        .update(
            state=State.STREAMING,
            reason="",
            error="",
            error_code="",
            client_ref=ref,
            model=model,
            request_id="",
            seq=0,
            hold_until=None,
            touched_at=timezone.now(),
        )
    )
    if not changed:
        raise ChatError("This answer is already being written.", "busy", 409)
    message.refresh_from_db()
    _show(message.conversation, message)
    return Turn(message.conversation, message, None, continues=continues)


def _answer(conversation: Conversation, question: Message, ref: str, model: str, new_question: Message | None) -> Turn:
    answer = Message.objects.create(
        conversation=conversation,
        parent=question,
        role=Role.ASSISTANT,
        state=State.STREAMING,
        client_ref=ref,
        model=model,
    )
    _show(conversation, answer)
    return Turn(conversation, answer, new_question)


def _show(conversation: Conversation, leaf: Message) -> None:
    conversation.leaf = leaf
    conversation.updated_at = timezone.now()
    conversation.save(update_fields=["leaf", "updated_at", "title"])


def is_cut(message: Message) -> bool:
    """Whether an answer ended before its end: stopped, failed, or at the token limit."""
    return message.state in (State.STOPPED, State.FAILED) or (
        message.state == State.COMPLETE and message.reason == "length"
    )


def prompt_messages(turn: Turn) -> list[dict[str, str]]:
    """The turns to send to the model for ``turn``'s answer.

    An answer that was stopped or has failed is left out: the model would read it as
    finished. One that met its token limit stays, marked with an ellipsis. User turns
    that thereby follow each other become one, since many templates refuse two in a row.
    """
    conversation, answer = turn.conversation, turn.answer
    by_id = {message.id: message for message in conversation.messages.all()}
    path: list[Message] = []
    at = answer.parent_id
    while at is not None and at in by_id:
        path.append(by_id[at])
        at = by_id[at].parent_id
    messages: list[dict[str, str]] = []
    if system := conversation.settings.get("system"):
        messages.append({"role": "system", "content": system})
    for message in reversed(path):
        if message.role == Role.USER:
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += "\n\n" + message.text
            else:
                messages.append({"role": "user", "content": message.text})
        elif message.state == State.COMPLETE and message.text.strip():
            cut = " …" if message.reason == "length" else ""
            messages.append({"role": "assistant", "content": message.text + cut})
    if turn.continues:
        messages.append({"role": "assistant", "content": answer.text})
    return messages


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


# --- presets -------------------------------------------------------------------------------


def save_preset(user: Any, name: Any, settings: Any) -> Preset:
    name = " ".join(str(name or "").split())[:60]
    if not name:
        raise ChatError("A preset needs a name.")
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
