"""What a send, an edit, a retry and a continue make of a conversation, and what the model is told of it.

Synchronous, as :mod:`apps.chat.services`, and acting for a user in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from apps.chat.models import TEXT_LIMIT, Conversation, Message, branch
from apps.chat.services import ChatError, Missing, create_conversation, get_conversation, get_message, parse_id

Role, State = Message.Role, Message.State


@dataclass(frozen=True)
class Turn:
    """What a send, edit, retry or continue has set up: the answer to generate."""

    conversation: Conversation
    answer: Message
    user_message: Message | None
    repeated: bool = False
    continues: bool = False


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
        conversation.save(update_fields=["title"])
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
    if cut.streaming:
        raise ChatError("This answer is already being written.", "busy", 409)
    if cut.role != Role.ASSISTANT or not is_cut(cut):
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
    conversation.save(update_fields=["leaf", "updated_at"])


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
    messages: list[dict[str, str]] = []
    if system := conversation.settings.get("system"):
        messages.append({"role": "system", "content": system})
    for message in branch(by_id, answer.parent_id):
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
