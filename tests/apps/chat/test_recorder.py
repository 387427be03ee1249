"""Answers that this process did not begin: their watchers are never left waiting."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.db import DatabaseError
from django.db.models.query import QuerySet

from apps.api.errors import ApiError
from apps.chat import turns
from apps.chat.live import LiveMarkdown
from apps.chat.models import Message
from apps.chat.recorder import Recorder
from apps.chat.recording import Recording
from apps.chat.turns import Turn
from apps.chat.writer import Caller
from inference.config import Config
from inference.messages import Frame, Job, ModelInfo
from sluice import runtime
from tests.core.conftest import Deploy, deploy  # noqa: F401

SECRET = "a question that no log may show"


@pytest.fixture
async def answer(transactional_db: Any) -> Message:
    """An answer that some other process is writing."""
    user = await sync_to_async(get_user_model().objects.create_user)("ada", password="x")
    turn = await sync_to_async(turns.start_turn)(user, "send", {"text": SECRET}, "ref", "m")
    return turn.answer


async def test_watchers_are_let_go_where_the_rows_cannot_be_read(
    answer: Message, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They ask again, and are served by whoever answers then. Without the task's edge they would wait for ever."""

    def broken(self: Any) -> Any:
        raise DatabaseError("the disk is gone")

    recorder = Recorder(gateway=None)  # type: ignore[arg-type]  # nothing gets as far as that
    monkeypatch.setattr(QuerySet, "first", broken)
    recording = recorder.join(answer, Caller(user_id=1, owner="user:1"))
    assert recording is not None
    watched = recording.version
    recorder.watch(recording, object())
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(10):
            await recording.wait_change(watched)
    assert recording.released
    assert recorder.join(answer, Caller(user_id=1, owner="user:1")) is not recording
    assert SECRET not in caplog.text
    await asyncio.sleep(0)


def test_an_answer_with_the_character_nul_can_be_stored() -> None:
    """By every database: PostgreSQL refuses it, and the whole answer with it."""
    recording = Recording(uuid.uuid4(), uuid.uuid4(), 1)
    recording.take([Frame(seq=1, text="a\x00b", ids=[1, 2])])
    assert recording.progress()["text"] == "a\ufffdb"


@pytest.mark.parametrize("mark", ["[", "!["])
async def test_a_long_text_that_is_taken_up_is_not_rendered_on_the_event_loop(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first rendering is of the whole text, and would hold up everybody's answers."""
    threads: list[int] = []
    update = LiveMarkdown.update

    def noted(self: LiveMarkdown, text: str) -> Any:
        threads.append(threading.get_ident())
        return update(self, text)

    monkeypatch.setattr(LiveMarkdown, "update", noted)
    recording = Recording(uuid.uuid4(), uuid.uuid4(), 1, mark * 3_000)
    assert await recording.show()
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    recording = Recording(uuid.uuid4(), uuid.uuid4(), 1, "short")
    await recording.show()
    assert threads[1:] == [threading.get_ident()]


async def test_an_answer_that_is_deleted_while_it_is_watched_is_let_go(answer: Message) -> None:
    recorder = Recorder(gateway=None)  # type: ignore[arg-type]
    recording = recorder.join(answer, Caller(user_id=1, owner="user:1"))
    assert recording is not None
    await sync_to_async(Message.objects.all().delete)()
    async with asyncio.timeout(10):
        while not recording.released:
            await recording.wait_change(recording.version)
    assert recording.over


@pytest.mark.parametrize(
    ("suggested", "chosen", "sent"),
    [
        ({}, {}, (0.7, 1.0)),
        ({"temperature": 0.6, "top_p": 0.95}, {}, (0.6, 0.95)),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 1.5}, (1.5, 0.95)),
    ],
)
async def test_an_answer_is_sampled_as_the_settings_show(
    answer: Message,
    suggested: dict[str, float],
    chosen: dict[str, float],
    sent: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A temperature of 1, the API's default, makes small models babble."""
    asked: list[dict[str, Any]] = []

    async def noted(request_id: str, model: str, messages: Any, params: dict[str, Any], **more: Any) -> Job:
        asked.append(params)
        raise ApiError(400, "enough")

    class Serving:
        def models(self) -> dict[str, ModelInfo]:
            return {"m": ModelInfo("m", "transformers", 100, 100, 1, suggested=suggested)}

    monkeypatch.setattr("apps.chat.writer.chat_job", noted)
    answer.conversation.settings = chosen
    recorder = Recorder(gateway=Serving())  # type: ignore[arg-type]
    recording = recorder.start(Turn(answer.conversation, answer, None), Caller(user_id=1, owner="user:1"))
    recorder.watch(recording, object())
    async with asyncio.timeout(10):
        while not recording.over:
            await recording.wait_change(recording.version)
    assert [(params["temperature"], params["top_p"]) for params in asked] == [sent]


async def test_a_generation_whose_answer_is_deleted_is_stopped(
    deploy: Deploy,
    transactional_db: Any,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it was deleted, with its user for one: nobody could read the rest."""
    models = "scripted=scripted:rate=20,say=1"
    monkeypatch.setattr(runtime, "_config", make_config(models=models))
    gateway, _ = await deploy(models=models).both()
    user = await sync_to_async(get_user_model().objects.create_user)("ada", password="x")
    body = {"text": f"[[say:{'long ' * 400}]]"}
    turn = await sync_to_async(turns.start_turn)(user, "send", body, "ref", "scripted")
    with runtime.replaced(gateway):
        recorder = Recorder(gateway)
        recording = recorder.start(turn, Caller(user_id=user.pk, owner=f"user:{user.pk}"))
        recorder.watch(recording, object())
        async with asyncio.timeout(20):
            while recording.tokens < 3:
                await recording.wait_change(recording.version)
            await sync_to_async(user.delete)()
            while not recording.over:
                await recording.wait_change(recording.version)
        assert await gateway.views.count() == 0


async def test_st_03_the_first_token_is_the_first_that_shows() -> None:
    recording = Recording(uuid.uuid4(), uuid.uuid4(), 1, "what is continued")
    recording.take([Frame(1, [1], "")])
    assert recording.ttft_ms is None
    recording.take([Frame(2, [2], "more")])
    assert recording.ttft_ms is not None
