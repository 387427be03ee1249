"""Answers that nobody watches any more are stopped, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.db import DatabaseError

from apps.chat import consumers, turns, writing
from apps.chat.models import Message
from apps.chat.recorder import Recorder
from apps.chat.recording import Recording
from inference.errors import StoreUnavailable
from inference.lifecycle import Reason
from sluice import runtime
from tests.apps.chat.sockets import TIMEOUT, open_chat
from tests.core.conftest import Deploy, deploy  # noqa: F401
from tests.support import eventually


async def test_an_answer_is_stopped_once_database_and_redis_answer_again(
    transactional_db: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was generated to its end for nobody: the task that had to stop it had died of the outage."""
    settings.CHAT_LEAVE_GRACE = 0.0
    asked: list[str] = []
    stopped = asyncio.Event()

    def held(message_id: uuid.UUID) -> bool:
        asked.append("database")
        if len(asked) == 1:
            raise DatabaseError("away")
        return False

    class Gateway:
        async def cancel(self, request_id: str, reason: Reason) -> None:
            asked.append(f"{request_id} {reason}")
            if len(asked) < 5:
                raise StoreUnavailable("away")
            stopped.set()

    monkeypatch.setattr(writing, "held", held)
    recorder = Recorder(Gateway())  # type: ignore[arg-type]
    recording = Recording(uuid.uuid4(), uuid.uuid4(), 1)
    recording.request_id = "chat-1"
    page = object()
    recorder.watch(recording, page)
    recorder.unwatch(recording, page)
    await asyncio.wait_for(stopped.wait(), 30)
    assert asked == ["database", "database", "chat-1 client_gone", "database", "chat-1 client_gone"]


@pytest.mark.parametrize("gone", ["when it is accepted", "before it is accepted", "with an error", "as it is cut off"])
async def test_an_answer_whose_page_has_gone_before_it_began_is_stopped(
    configured: None, deploy: Deploy, settings: Any, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """It was generated to its end for nobody: it had no watcher that could have left."""
    settings.CHAT_LEAVE_GRACE = 0.0
    settings.CHAT_LOST_GRACE = 0.0 if gone == "as it is cut off" else 600.0
    gateway, _ = await deploy(models="scripted=scripted:rate=20,say=1").both()
    user = await sync_to_async(get_user_model().objects.create_user)("ada", password="x")
    with runtime.replaced(gateway):
        socket = await open_chat(user)

        async def closing(self: Any, message: dict[str, Any]) -> None:
            """As Daphne, which drops what a socket that closes is sent, or as a server that raises then."""
            if message["type"] != "accepted":
                return
            if gone == "as it is cut off":
                raise asyncio.CancelledError
            await socket.send_input({"type": "websocket.disconnect", "code": 4001})
            if gone == "with an error":
                raise OSError("closed")

        if gone == "before it is accepted":
            start = turns.start_turn

            def leaving(*args: Any) -> Any:
                turn = start(*args)
                asyncio.run_coroutine_threadsafe(
                    socket.send_input({"type": "websocket.disconnect", "code": 4001}), loop
                ).result(TIMEOUT)
                return turn

            loop = asyncio.get_running_loop()
            monkeypatch.setattr(turns, "start_turn", leaving)
        else:
            monkeypatch.setattr(consumers.ChatConsumer, "send_json", closing)
        body = {"type": "generate", "id": "one", "text": f"[[say:{'long ' * 400}]]", "model": "scripted"}
        await socket.send_json_to(body)

        async def stopped() -> bool:
            answers = Message.objects.filter(role=Message.Role.ASSISTANT)
            stored = [(answer.state, answer.reason) async for answer in answers]
            assert stored == [(Message.State.STOPPED, "left")]
            return True

        await eventually(stopped, timeout=TIMEOUT, what="the answer is stopped")
        await eventually(lambda: not consumers.recorder()._tasks, timeout=TIMEOUT, what="nothing is written any more")
