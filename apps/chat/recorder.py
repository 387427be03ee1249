"""The server writes the answers down, whoever is watching.

For each answer one task holds the request at the gateway, adds its frames to a
:class:`Recording`, saves text and sequence number once a second and the end
once. Sockets only watch, so a closed tab, a reload or a second tab changes
nothing about what is stored.

An answer nobody watches is stopped: after ``CHAT_LEAVE_GRACE`` seconds where the
page said that it goes (a reload comes back within that, or at least asks for its
page, which holds the answer for ``writing.HOLD_SECONDS``), after
``CHAT_LOST_GRACE`` where the connection was lost.

Another server may be writing: then the rows are followed, and taken over once
they have not been touched for ``STALE_SECONDS``.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from channels.db import database_sync_to_async
from django.conf import settings
from django.db import DatabaseError
from django.utils import timezone

from apps.accounts.limits import LimitExceeded, limiter_of
from apps.accounts.quota import Quota
from apps.api.errors import ApiError, from_refusal
from apps.api.service import chat_job
from apps.chat import turns, writing
from apps.chat.models import Message
from apps.chat.recording import Recording
from apps.chat.serialise import message_json, sibling_ids
from apps.chat.turns import Turn
from apps.chat.writing import State
from inference.errors import NotFound, Refused, StoreUnavailable
from inference.gateway import Detached, Gateway, RequestEnded, RequestSpec, RequestStream
from inference.lifecycle import Reason
from inference.lifecycle import State as Life

logger = logging.getLogger("sluice.chat")

CHECKPOINT_SECONDS = 1.0
STALE_SECONDS = 4.0
FOLLOW_SECONDS = 0.4


@dataclass(frozen=True)
class Caller:
    """On whose behalf an answer is generated."""

    user_id: int
    owner: str
    client: str = ""
    priority: str = "normal"
    quotas: tuple[Quota, ...] = ()


Opener = Callable[[], AbstractAsyncContextManager[RequestStream]]


class Recorder:
    """All recordings of this process."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._recordings: dict[uuid.UUID, Recording] = {}
        self._streams: dict[uuid.UUID, RequestStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: dict[uuid.UUID, asyncio.Task[None]] = {}

    # -- for the consumer --------------------------------------------------------------------

    def start(self, turn: Turn, caller: Caller) -> Recording:
        """Begin generating an answer that ``turns.start_turn`` has set up."""
        answer = turn.answer
        recording = Recording(answer.id, answer.conversation_id, caller.user_id, answer.text)
        recording.tokens = answer.generated_tokens if turn.continues else 0
        recording.request_id = f"chat-{uuid.uuid4().hex}"
        self._recordings[answer.id] = recording
        self._spawn(self._generate(recording, turn, caller), f"chat-{answer.id}")
        return recording

    def join(self, message: Message, caller: Caller) -> Recording | None:
        """The recording of an answer that is being written, taking it up if need be; else ``None``."""
        recording = self._recordings.get(message.id)
        if recording is not None and not recording.released:
            return recording
        if not message.streaming:
            return None
        recording = Recording.of(message, caller.user_id)
        self._recordings[message.id] = recording
        self._spawn(self._take_up(recording, caller), f"chat-{message.id}")
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
        recording.stop_wanted = reason
        stream = self._streams.get(recording.message_id)
        if stream is not None:
            stream.cancel(reason)
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

    def _spawn(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _abandon(self, recording: Recording, grace: float) -> None:
        try:
            await asyncio.sleep(grace)
            while await database_sync_to_async(writing.held)(recording.message_id):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            if not recording.watchers and not recording.over:
                await self.stop(recording, Reason.CLIENT_GONE)
        finally:
            if self._leaving.get(recording.message_id) is asyncio.current_task():
                del self._leaving[recording.message_id]

    async def _generate(self, recording: Recording, turn: Turn, caller: Caller) -> None:
        try:
            begin = database_sync_to_async(writing.begin_request)
            await begin(recording.message_id, recording.request_id)
            messages = await database_sync_to_async(turns.prompt_messages)(turn)
            params = {
                name: turn.conversation.settings[name]
                for name in ("temperature", "top_p", "max_tokens")
                if name in turn.conversation.settings
            }
            job = await chat_job(
                recording.request_id, turn.answer.model, messages, params,
                continue_final=turn.continues, quotas=caller.quotas,
            )  # fmt: skip
        except ApiError as exc:
            await self._end(recording, State.FAILED, "refused", exc.message, exc.code or "invalid")
            return
        except (StoreUnavailable, DatabaseError) as exc:
            await self._end(recording, State.FAILED, "unavailable", _UNAVAILABLE, type(exc).__name__)
            return
        except Exception:
            # The edge of this task: the answer must not stay "streaming" for ever.
            logger.exception("chat answer %s could not be started", recording.message_id)
            await self._end(recording, State.FAILED, "internal", _INTERNAL, "internal")
            return
        recording.prompt_tokens = len(job.prompt_ids)
        spec = RequestSpec(
            job=job,
            endpoint="chat-ui",
            transport="ws",
            owner=caller.owner,
            client=caller.client,
            priority=caller.priority,
            resumable=True,
        )
        try:
            held = limiter_of(self.gateway).hold(
                caller.quotas, job.id, prompt_tokens=recording.prompt_tokens, max_tokens=job.params.max_tokens
            )
            async with held as lease:
                await self._record(recording, lambda: self.gateway.request(spec))
                lease.used = recording.prompt_tokens + recording.tokens
        except LimitExceeded as exc:
            await self._end(recording, State.FAILED, "refused", str(exc), "rate_limit_exceeded")
        except StoreUnavailable:
            await self._end(recording, State.FAILED, "unavailable", _UNAVAILABLE, "store_unavailable")

    async def _take_up(self, recording: Recording, caller: Caller) -> None:
        """Go on with an answer that this process did not begin."""
        try:
            if await self._follow(recording):
                return
        except Exception:
            # The edge of this task: its watchers are let go and ask again, rather than wait for ever.
            logger.exception("chat answer %s can not be followed", recording.message_id)
            self._drop(recording)
            recording.release()
            return
        if not recording.request_id:
            await self._end(recording, State.FAILED, "interrupted", _INTERRUPTED, "interrupted")
            return
        request_id, seq = recording.request_id, recording.seq
        await self._record(recording, lambda: self.gateway.attach(request_id, after_seq=seq, owner=caller.owner))

    async def _follow(self, recording: Recording) -> bool:
        """Show what another process saves, until the answer ends (true) or its writer is gone (false)."""
        while True:
            row = await database_sync_to_async(Message.objects.filter(id=recording.message_id).first)()
            if row is None:
                self._drop(recording)
                recording.release()
                return True
            if not row.streaming:
                recording.replace(row.text, row.seq)
                await self._publish(recording)
                return True
            recording.request_id = row.request_id
            recording.replace(row.text, row.seq)
            if (timezone.now() - row.touched_at).total_seconds() > STALE_SECONDS:
                return False
            if recording.watchers:
                # The writer counts only its own watchers; this keeps it going for ours.
                await database_sync_to_async(writing.hold)(row.conversation_id)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def _record(self, recording: Recording, opener: Opener) -> None:
        try:
            async with opener() as stream:
                self._streams[recording.message_id] = stream
                if recording.stop_wanted is not None:
                    stream.cancel(recording.stop_wanted)
                keeper = self._spawn(self._keep(recording, stream), f"chat-keep-{recording.message_id}")
                try:
                    while recording.finish is None:
                        recording.take(await stream.next())
                finally:
                    keeper.cancel()
                    await asyncio.gather(keeper, return_exceptions=True)
        except RequestEnded as exc:
            await self._ended_early(recording, exc)
        except Detached as exc:
            await self._release(recording, free=not exc.superseded)
        except NotFound:
            await self._end(recording, State.FAILED, "interrupted", _INTERRUPTED, "interrupted")
        except Refused as exc:
            code = from_refusal(exc, "", 0.0).code or "refused"
            await self._end(recording, State.FAILED, "refused", str(exc), code)
        except StoreUnavailable:
            await self._end(recording, State.FAILED, "unavailable", _UNAVAILABLE, "store_unavailable")
        except asyncio.CancelledError:
            recording.release()
            raise
        except Exception:
            # The edge of this task: a reply is owed to every watcher.
            logger.exception("chat answer %s broke off", recording.message_id)
            await self._end(recording, State.FAILED, "internal", _INTERNAL, "internal")
        else:
            await self._finished(recording)
        finally:
            self._streams.pop(recording.message_id, None)

    async def _keep(self, recording: Recording, stream: RequestStream) -> None:
        """Learn the queue position, and save what has come, about once a second."""
        since_save = 0.0
        step = 0.4
        while True:
            try:
                if stream.phase == "queued":
                    recording.place(await stream.queue_position())
                else:
                    recording.place(None)
                await asyncio.sleep(step)
                since_save += step
                if since_save >= CHECKPOINT_SECONDS:
                    since_save = 0.0
                    await self._checkpoint(recording)
            except (StoreUnavailable, DatabaseError):
                logger.warning("chat answer %s: progress not saved", recording.message_id)
                await asyncio.sleep(1)

    async def _checkpoint(self, recording: Recording) -> None:
        saved = await database_sync_to_async(writing.checkpoint)(
            recording.message_id, recording.request_id, **recording.progress()
        )
        if not saved and not await Message.objects.filter(id=recording.message_id).aexists():
            # Deleted, by a page or with its user: nobody can read the rest.
            await self.stop(recording, Reason.CLIENT_GONE)

    # -- ends --------------------------------------------------------------------------------

    async def _finished(self, recording: Recording) -> None:
        if recording.finish == "error":
            message = recording.error or "The engine failed on this answer."
            await self._end(recording, State.FAILED, "error", message, "engine_error")
        else:
            await self._end(recording, State.COMPLETE, recording.finish or "stop")

    async def _ended_early(self, recording: Recording, exc: RequestEnded) -> None:
        outcome = exc.outcome
        if outcome.state == Life.FINISHED:
            await self._end(recording, State.COMPLETE, str(outcome.reason))
        elif outcome.reason == Reason.USER:
            await self._end(recording, State.STOPPED, "user")
        elif outcome.reason == Reason.CLIENT_GONE:
            await self._end(recording, State.STOPPED, "left")
        else:
            await self._end(recording, State.FAILED, str(outcome.reason), str(exc), str(outcome.reason))

    async def _release(self, recording: Recording, *, free: bool) -> None:
        """Save what is here; whoever attaches next reads the rest from the log.

        ``free``: nobody writes it now, so the next one need not wait for signs of life.
        """
        self._drop(recording)
        try:
            await self._checkpoint(recording)
            if free:
                await database_sync_to_async(writing.abandon)(recording.message_id, recording.request_id)
        except DatabaseError:
            logger.warning("chat answer %s: last text not saved", recording.message_id)
        recording.release()

    async def _end(self, recording: Recording, state: str, reason: str, error: str = "", code: str = "") -> None:
        fields = {
            "state": state,
            "reason": reason,
            "error": error[:500],
            "error_code": code[:40],
            **recording.progress(),
        }
        for delay in (0.1, 0.5, 2.0, 5.0, None):
            try:
                finish = database_sync_to_async(writing.finish)
                await finish(recording.message_id, recording.request_id, **fields)
                break
            except DatabaseError:
                logger.exception("chat answer %s: its end is not saved yet", recording.message_id)
                if delay is None:
                    break
                await asyncio.sleep(delay)
        await self._publish(recording)

    async def _publish(self, recording: Recording) -> None:
        """Give watchers the answer as it is now stored; without the database, let them ask again."""
        self._drop(recording)
        try:
            recording.end(await database_sync_to_async(_final)(recording.message_id))
        except (DatabaseError, Message.DoesNotExist):
            recording.release()

    def _drop(self, recording: Recording) -> None:
        if self._recordings.get(recording.message_id) is recording:
            del self._recordings[recording.message_id]


def _final(message_id: uuid.UUID) -> dict[str, Any]:
    message = Message.objects.get(id=message_id)
    return message_json(message, sibling_ids(message))


_INTERNAL = "Something went wrong on the server."
_UNAVAILABLE = "The service could not reach its own store. Try again in a moment."
_INTERRUPTED = "The answer was interrupted and could not be picked up again."
