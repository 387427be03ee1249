"""The server writes the answers down, whoever is watching.

For each answer one task (see :mod:`apps.chat.writer`) writes into a
:class:`Recording`. Sockets only watch, so a closed tab, a reload or a second tab
changes nothing about what is stored.

An answer nobody watches is stopped: after ``CHAT_LEAVE_GRACE`` seconds where the
page said that it goes (a reload comes back within that, or at least asks for its
page, which holds the answer for ``writing.HOLD_SECONDS``), after
``CHAT_LOST_GRACE`` where the connection was lost.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from typing import Any

from channels.db import database_sync_to_async
from django.conf import settings
from django.db import DatabaseError

from apps.chat import writing
from apps.chat.models import Message
from apps.chat.recording import Recording
from apps.chat.turns import Turn
from apps.chat.writer import Caller, Writer
from inference.errors import StoreUnavailable
from inference.gateway import Gateway
from inference.lifecycle import Reason

logger = logging.getLogger("sluice.chat")


class Recorder:
    """All recordings of this process."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._recordings: dict[uuid.UUID, Recording] = {}
        self._writers: dict[Recording, Writer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: dict[uuid.UUID, asyncio.Task[None]] = {}

    # -- for the consumer --------------------------------------------------------------------

    def start(self, turn: Turn, caller: Caller) -> Recording:
        """Begin generating an answer that ``turns.start_turn`` has set up."""
        answer = turn.answer
        recording = Recording(answer.id, answer.conversation_id, caller.user_id, answer.text)
        recording.tokens = answer.generated_tokens if turn.continues else 0
        recording.request_id = f"chat-{uuid.uuid4().hex}"
        self._write(recording, caller, turn)
        return recording

    def join(self, message: Message, caller: Caller) -> Recording | None:
        """The recording of an answer that is being written, taking it up if need be; else ``None``."""
        recording = self._recordings.get(message.id)
        if recording is not None and not recording.released:
            return recording
        if not message.streaming:
            return None
        recording = Recording.of(message, caller.user_id)
        self._write(recording, caller)
        return recording

    def watch(self, recording: Recording, watcher: object) -> None:
        recording.watchers.add(watcher)
        leaving = self._leaving.pop(recording.message_id, None)
        if leaving is not None:
            leaving.cancel()

    def unwatch(self, recording: Recording, watcher: object, *, lost: bool = False) -> None:
        """``lost``: the connection broke, the page did not say goodbye."""
        recording.watchers.discard(watcher)
        if recording.watchers or recording.over or recording.message_id in self._leaving:
            return
        name, default = ("CHAT_LOST_GRACE", 30.0) if lost else ("CHAT_LEAVE_GRACE", 1.2)
        grace = getattr(settings, name, default)
        task = self._spawn(self._abandon(recording, grace), f"chat-leave-{recording.message_id}")
        self._leaving[recording.message_id] = task

    async def stop(self, recording: Recording, reason: Reason = Reason.USER) -> None:
        """End an answer early; what has come so far stays."""
        writer = self._writers.get(recording)
        if writer is not None:
            await writer.stop(reason)
        elif recording.request_id:
            await self.gateway.cancel(recording.request_id, reason)

    async def stop_message(self, message: Message, reason: Reason = Reason.USER) -> None:
        """End an answer that this or another process writes."""
        recording = self._recordings.get(message.id)
        if recording is not None and not recording.over:
            await self.stop(recording, reason)
        elif message.streaming and message.request_id:
            await self.gateway.cancel(message.request_id, reason)

    # -- tasks -------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _write(self, recording: Recording, caller: Caller, turn: Turn | None = None) -> None:
        """Have a task write the answer: that of ``turn`` from its prompt, any other from where it stands."""
        writer = Writer(self.gateway, recording, caller, self._drop)
        self._recordings[recording.message_id] = recording
        self._writers[recording] = writer
        work = writer.take_up() if turn is None else writer.generate(turn)
        task = self._spawn(work, f"chat-{recording.message_id}")
        task.add_done_callback(lambda _: self._writers.pop(recording))

    async def _abandon(self, recording: Recording, grace: float) -> None:
        try:
            await asyncio.sleep(grace)
            while not recording.watchers and not recording.over:
                try:
                    if not await database_sync_to_async(writing.held)(recording.message_id):
                        await self.stop(recording, Reason.CLIENT_GONE)
                        return
                except (DatabaseError, StoreUnavailable) as exc:
                    logger.warning("chat answer %s: not stopped yet (%s)", recording.message_id, type(exc).__name__)
                await asyncio.sleep(0.5)
        finally:
            if self._leaving.get(recording.message_id) is asyncio.current_task():
                del self._leaving[recording.message_id]

    def _drop(self, recording: Recording) -> None:
        if self._recordings.get(recording.message_id) is recording:
            del self._recordings[recording.message_id]
