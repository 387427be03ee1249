"""The chat's socket after its session has ended: every message asks who it is."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session

from inference.config import Config
from sluice import runtime
from tests.apps.chat.test_rate_limits import TIMEOUT, open_chat


def sign_out(user: Any) -> None:
    Session.objects.all().delete()


def deactivate(user: Any) -> None:
    user.is_active = False
    user.save()


def change_password(user: Any) -> None:
    user.set_password("another")
    user.save()


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Config]) -> None:
    monkeypatch.setattr(runtime, "_config", make_config())


@pytest.mark.parametrize("end", [sign_out, deactivate, change_password])
@pytest.mark.parametrize("kind", ["attach", "cancel", "generate", "models"])
async def test_a_message_after_the_end_of_the_session_closes_the_socket(
    transactional_db: Any, end: Callable[[Any], None], kind: str
) -> None:
    user = await sync_to_async(get_user_model().objects.create_user)("ada", password="x")
    socket = await open_chat(user)
    await sync_to_async(end)(user)
    await socket.send_json_to({"type": kind, "id": "one", "message": str(uuid.uuid4())})
    said = await socket.receive_json_from(TIMEOUT)
    assert (said["type"], said["id"], said["error"]["code"]) == ("error", "one", "unauthorised")
    closed = await socket.receive_output(TIMEOUT)
    assert (closed["type"], closed["code"]) == ("websocket.close", 4401)
    await socket.disconnect()
