"""Conversations as the page is shown them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model

from apps.chat import turns, writing
from apps.chat.models import Conversation, Message
from apps.chat.serialise import detail_json


@pytest.mark.django_db
def test_a_branch_that_is_begun_while_a_page_is_made_is_shown() -> None:
    """The page showed the branch before, as the first of two, and nothing told it better."""
    user: Any = get_user_model().objects.create_user("ada", password="x")
    first = turns.start_turn(user, "send", {"text": "a"}, "one", "m")
    writing.begin_request(first.answer.id, "r")
    assert writing.finish(first.answer.id, "r", text="1", state=Message.State.COMPLETE)
    read = Conversation.objects.get()
    assert first.user_message is not None
    edited = turns.start_turn(user, "edit", {"text": "b", "message": first.user_message.id}, "two", "m")
    detail = detail_json(read)
    assert [message["id"] for message in detail["messages"]][-1] == detail["conversation"]["leaf"]
    assert detail["conversation"]["leaf"] == str(edited.answer.id)
    assert len(detail["messages"][0]["siblings"]) == 2
