"""The chat's socket after its session has ended: every message asks who it is, and every stream again and again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session
from django.db import DatabaseError

from apps.chat import consumers, turns, writing
from apps.chat.live import complete, complete_content
from apps.chat.recording import Recording
from tests.apps.chat.sockets import TIMEOUT, open_chat

pytestmark = pytest.mark.usefixtures("configured")


def sign_out(user: Any) -> None:
    Session.objects.all().delete()


def deactivate(user: Any) -> None:
    user.is_active = False
    user.save()


def change_password(user: Any) -> None:
    user.set_password("another")
    user.save()


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


class Silent:
    """A recorder whose one answer waits in a queue."""

    def __init__(self) -> None:
        self.recording = Recording(uuid.uuid4(), uuid.uuid4(), 1)
        self.recording.place(3)
        self.watchers: set[object] = set()

    def join(self, message: Any, caller: Any) -> Recording:
        return self.recording

    def watch(self, recording: Recording, watcher: object) -> None:
        self.watchers.add(watcher)

    def unwatch(self, recording: Recording, watcher: object, *, lost: bool) -> None:
        self.watchers.discard(watcher)


@pytest.mark.parametrize("end", [sign_out, deactivate, change_password])
async def test_a_stream_on_which_nothing_changes_ends_with_its_session(
    transactional_db: Any, monkeypatch: pytest.MonkeyPatch, end: Callable[[Any], None]
) -> None:
    keeper = Silent()
    monkeypatch.setattr(consumers, "recorder", lambda: keeper)
    monkeypatch.setattr(consumers, "ASK_AGAIN", 1.0)  # after what is written below
    user = await sync_to_async(get_user_model().objects.create_user)("ada", password="x")
    turn = await sync_to_async(turns.start_turn)(user, "send", {"text": "x"}, "ref", "m")
    socket = await open_chat(user)
    await socket.send_json_to({"type": "attach", "id": "one", "message": str(turn.answer.id)})
    assert await socket.receive_json_from(TIMEOUT) == {"type": "queued", "id": "one", "position": 3}
    assert keeper.watchers
    # Messages are dealt with one after the other: with this reply nothing of the first is still being written.
    await socket.send_json_to({"type": "ping"})
    assert (await socket.receive_json_from(TIMEOUT))["type"] == "pong"
    await sync_to_async(end)(user)
    said = await socket.receive_json_from(TIMEOUT)
    assert (said["type"], said["id"], said["error"]["code"]) == ("error", "one", "unauthorised")
    closed = await socket.receive_output(TIMEOUT)
    assert (closed["type"], closed["code"]) == ("websocket.close", 4401)
    await socket.disconnect()
    assert not keeper.watchers


async def test_a_hold_that_can_not_be_ended_is_no_error_of_the_stream(
    transactional_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(message_id: uuid.UUID) -> None:
        raise DatabaseError("away")

    keeper = Silent()
    monkeypatch.setattr(consumers, "recorder", lambda: keeper)
    monkeypatch.setattr(writing, "unhold", away)
    user = await sync_to_async(get_user_model().objects.create_user)("ada", password="x")
    turn = await sync_to_async(turns.start_turn)(user, "send", {"text": "x"}, "ref", "m")
    socket = await open_chat(user)
    await socket.send_json_to({"type": "attach", "id": "one", "message": str(turn.answer.id)})
    await socket.send_json_to({"type": "ping"})
    said = [(await socket.receive_json_from(TIMEOUT))["type"] for _ in range(2)]
    assert sorted(said) == ["pong", "queued"]
    await socket.disconnect()


async def test_the_last_rendering_of_an_answer_leaves_the_event_loop_free(
    transactional_db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of the whole text, whatever the one before has shown."""
    keeper = Silent()
    threads: list[int] = []

    def noted(text: str) -> Any:
        threads.append(threading.get_ident())
        return complete(text)

    monkeypatch.setattr(consumers, "recorder", lambda: keeper)
    monkeypatch.setattr(consumers, "complete", noted)
    user = await sync_to_async(get_user_model().objects.create_user)("ada", password="x")
    turn = await sync_to_async(turns.start_turn)(user, "send", {"text": "x"}, "ref", "m")
    socket = await open_chat(user)
    await socket.send_json_to({"type": "attach", "id": "one", "message": str(turn.answer.id)})
    assert (await socket.receive_json_from(TIMEOUT))["type"] == "queued"
    text = "A *whole* answer.\n\n```python\nx = 1\n```\n"
    keeper.recording.end({"text": text})
    said = await socket.receive_json_from(TIMEOUT)
    assert said == {"type": "done", "id": "one", "message": {"text": text, "content": complete_content(text)}}
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    await socket.disconnect()
