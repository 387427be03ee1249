"""Answers that nobody watches any more are stopped, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from django.db import DatabaseError

from apps.chat import writing
from apps.chat.recorder import Recorder
from apps.chat.recording import Recording
from inference.errors import StoreUnavailable
from inference.lifecycle import Reason


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
