"""What deletes text and credentials when their time has passed, and what it leaves."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.utils import timezone

from apps.accounts.models import Ticket
from apps.accounts.retention import purge
from apps.api import models as api
from apps.chat.models import Conversation, Message

pytestmark = pytest.mark.django_db


def conversation(days: float, text: str) -> Conversation:
    user, _ = User.objects.get_or_create(username="ann")
    made = Conversation.objects.create(user=user, updated_at=timezone.now() - timedelta(days=days))
    first = Message.objects.create(conversation=made, role="user", text=text)
    Message.objects.create(conversation=made, role="assistant", text=text, parent=first)
    Conversation.objects.filter(pk=made.pk).update(leaf=first, updated_at=made.updated_at)
    return made


def texts() -> set[str]:
    return set(Message.objects.values_list("text", flat=True))


def test_conversations_go_by_age_with_every_message() -> None:
    conversation(40, "old"), conversation(31, "older than a month"), conversation(29, "young")
    assert purge()["kept responses"] == 0
    assert texts() == {"old", "older than a month", "young"}, "without a time nothing is too old"
    assert purge(30)["conversations"] == 2
    assert texts() == {"young"}
    assert purge(30)["conversations"] == 0


def test_what_has_expired_goes_always() -> None:
    now = timezone.now()
    for name, seconds in (("past", -1), ("valid", 60)):
        api.KeptResponse.objects.create(
            id=name, owner="key:x", expires_at=now + timedelta(seconds=seconds), conversation=[], response={}
        )
        Session.objects.create(session_key=name, session_data="", expire_date=now + timedelta(seconds=seconds))
        Ticket.objects.create(digest=name, principal={}, expires_at=now + timedelta(seconds=seconds))
    assert purge() == {"kept responses": 1, "sessions": 1, "WebSocket tickets": 1}
    for model, field in ((api.KeptResponse, "id"), (Session, "session_key"), (Ticket, "digest")):
        assert list(model.objects.values_list(field, flat=True)) == ["valid"]


def test_command_takes_days_or_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation(40, "old"), conversation(3, "new")
    out = StringIO()
    call_command("purge", stdout=out)
    assert "conversations" not in out.getvalue()
    call_command("purge", "--older-than", "30", stdout=out)
    assert "1 conversations deleted" in out.getvalue() and texts() == {"new"}
    monkeypatch.setattr("apps.accounts.management.commands.purge.server_config", lambda: FewDays())
    call_command("purge", stdout=out)
    assert not texts()
    for bad in ("-1", "soon", "nan", "1e9"):
        with pytest.raises(CommandError, match="number of days"):
            call_command("purge", "--older-than", bad)


class FewDays:
    retention_days = 2
