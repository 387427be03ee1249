"""The task that writes one answer: from the prompt, or from where another process left it, to its end.

It holds the request at the gateway, adds its frames to the :class:`Recording`, saves
text and sequence number once a second and the end once.

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
from django.db import DatabaseError
from django.utils import timezone

from apps.accounts.limits import LimitExceeded, limiter_of
from apps.accounts.quota import Quota
from apps.api.errors import ApiError, from_refusal
from apps.api.service import chat_job
from apps.chat import offers, turns, writing
from apps.chat.models import Message
from apps.chat.recording import Recording
from apps.chat.serialise import message_json, sibling_ids
from apps.chat.turns import Turn
from apps.chat.writing import State
from inference.errors import NotFound, Refused, StoreUnavailable
from inference.gateway import Detached, Gateway, RequestEnded, RequestSpec, RequestStream
from inference.lifecycle import Reason
from inference.lifecycle import State as Life
from inference.messages import Job

logger = logging.getLogger("sluice.chat")

CHECKPOINT_SECONDS = 1.0
STALE_SECONDS = 4.0
FOLLOW_SECONDS = 0.4

_INTERNAL = "Something went wrong on the server."
_UNAVAILABLE = "The service could not reach its own store. Try again in a moment."
_INTERRUPTED = "The answer was interrupted and could not be picked up again."


@dataclass(frozen=True)
class Caller:
    """On whose behalf an answer is generated."""

    user_id: int
    owner: str
    client: str = ""
    priority: str = "normal"
    quotas: tuple[Quota, ...] = ()


Opener = Callable[[], AbstractAsyncContextManager[RequestStream]]


class Writer:
    """Writes one answer; exactly one of :meth:`generate` and :meth:`take_up` is its task.

    ``let_go`` is called when this process has the answer no longer, just before
    the watchers learn it.
    """

    def __init__(
        self, gateway: Gateway, recording: Recording, caller: Caller, let_go: Callable[[Recording], None]
    ) -> None:
        self.gateway = gateway
        self.recording = recording
        self.caller = caller
        self._let_go = let_go
        self._stream: RequestStream | None = None

    async def stop(self, reason: Reason) -> None:
        """End the answer early; what has come so far stays.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        self.recording.stop_wanted = reason
        if self._stream is not None:
            self._stream.cancel(reason)
        elif self.recording.request_id:
            await self.gateway.cancel(self.recording.request_id, reason)

    # -- tasks -------------------------------------------------------------------------------

    async def generate(self, turn: Turn) -> None:
        """Write an answer that ``turns.start_turn`` has set up."""
        recording = self.recording
        try:
            job = await self._prepare(turn)
        except ApiError as exc:
            await self._end(State.FAILED, "refused", exc.message, exc.code or "invalid")
            return
        except (StoreUnavailable, DatabaseError) as exc:
            await self._end(State.FAILED, "unavailable", _UNAVAILABLE, type(exc).__name__)
            return
        except Exception:
            # The edge of this task: the answer must not stay "streaming" for ever.
            logger.exception("chat answer %s could not be started", recording.message_id)
            await self._end(State.FAILED, "internal", _INTERNAL, "internal")
            return
        recording.prompt_tokens = len(job.prompt_ids)
        spec = RequestSpec(
            job=job,
            endpoint="chat-ui",
            transport="ws",
            owner=self.caller.owner,
            client=self.caller.client,
            priority=self.caller.priority,
            resumable=True,
        )
        try:
            held = limiter_of(self.gateway).hold(
                self.caller.quotas, job.id, prompt_tokens=recording.prompt_tokens, max_tokens=job.params.max_tokens
            )
            async with held as lease:
                await self._record(lambda: self.gateway.request(spec))
                lease.used = recording.prompt_tokens + recording.tokens
        except LimitExceeded as exc:
            await self._end(State.FAILED, "refused", str(exc), "rate_limit_exceeded")
        except StoreUnavailable:
            await self._end(State.FAILED, "unavailable", _UNAVAILABLE, "store_unavailable")

    async def _prepare(self, turn: Turn) -> Job:
        recording = self.recording
        await database_sync_to_async(writing.begin_request)(recording.message_id, recording.request_id)
        messages = await database_sync_to_async(turns.prompt_messages)(turn)
        params: dict[str, Any] = {**offers.defaults(turn.answer.model, self.gateway.models())}
        for name in ("temperature", "top_p", "max_tokens"):
            if name in turn.conversation.settings:
                params[name] = turn.conversation.settings[name]
        return await chat_job(
            recording.request_id, turn.answer.model, messages, params,
            continue_final=turn.continues, quotas=self.caller.quotas,
        )  # fmt: skip

    async def take_up(self) -> None:
        """Go on with an answer that this process did not begin."""
        recording = self.recording
        try:
            if await self._follow():
                return
        except Exception:
            # The edge of this task: its watchers are let go and ask again, rather than wait for ever.
            logger.exception("chat answer %s can not be followed", recording.message_id)
            self._let_go(recording)
            recording.release()
            return
        if not recording.request_id:
            await self._end(State.FAILED, "interrupted", _INTERRUPTED, "interrupted")
            return
        request_id, seq = recording.request_id, recording.seq
        await self._record(lambda: self.gateway.attach(request_id, after_seq=seq, owner=self.caller.owner))

    async def _follow(self) -> bool:
        """Show what another process saves, until the answer ends (true) or its writer is gone (false)."""
        recording = self.recording
        while True:
            row = await database_sync_to_async(Message.objects.filter(id=recording.message_id).first)()
            if row is None:
                self._let_go(recording)
                recording.release()
                return True
            if not row.streaming:
                recording.replace(row.text, row.seq)
                await self._publish()
                return True
            recording.request_id = row.request_id
            recording.replace(row.text, row.seq)
            if (timezone.now() - row.touched_at).total_seconds() > STALE_SECONDS:
                return False
            if recording.watchers:
                # The writer counts only its own watchers; this keeps it going for ours.
                await database_sync_to_async(writing.hold)(row.conversation_id)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def _record(self, opener: Opener) -> None:
        recording = self.recording
        try:
            async with opener() as stream:
                self._stream = stream
                if recording.stop_wanted is not None:
                    stream.cancel(recording.stop_wanted)
                keeper = asyncio.create_task(self._keep(stream), name=f"chat-keep-{recording.message_id}")
                try:
                    while recording.finish is None:
                        recording.take(await stream.next())
                finally:
                    keeper.cancel()
                    await asyncio.gather(keeper, return_exceptions=True)
        except RequestEnded as exc:
            await self._ended_early(exc)
        except Detached as exc:
            await self._release(free=not exc.superseded)
        except NotFound:
            await self._end(State.FAILED, "interrupted", _INTERRUPTED, "interrupted")
        except Refused as exc:
            code = from_refusal(exc, "", 0.0).code or "refused"
            await self._end(State.FAILED, "refused", str(exc), code)
        except StoreUnavailable:
            await self._end(State.FAILED, "unavailable", _UNAVAILABLE, "store_unavailable")
        except asyncio.CancelledError:
            recording.release()
            raise
        except Exception:
            # The edge of this task: a reply is owed to every watcher.
            logger.exception("chat answer %s broke off", recording.message_id)
            await self._end(State.FAILED, "internal", _INTERNAL, "internal")
        else:
            await self._finished()
        finally:
            self._stream = None

    async def _keep(self, stream: RequestStream) -> None:
        """Learn the queue position, and save what has come, about once a second."""
        recording = self.recording
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
                    await self._checkpoint()
            except (StoreUnavailable, DatabaseError):
                logger.warning("chat answer %s: progress not saved", recording.message_id)
                await asyncio.sleep(1)

    async def _checkpoint(self) -> None:
        recording = self.recording
        saved = await database_sync_to_async(writing.checkpoint)(
            recording.message_id, recording.request_id, **recording.progress()
        )
        if not saved and not await Message.objects.filter(id=recording.message_id).aexists():
            # Deleted, by a page or with its user: nobody can read the rest.
            await self.stop(Reason.CLIENT_GONE)

    # -- ends --------------------------------------------------------------------------------

    async def _finished(self) -> None:
        recording = self.recording
        if recording.finish == "error":
            message = recording.error or "The engine failed on this answer."
            await self._end(State.FAILED, "error", message, "engine_error")
        else:
            await self._end(State.COMPLETE, recording.finish or "stop")

    async def _ended_early(self, exc: RequestEnded) -> None:
        outcome = exc.outcome
        if outcome.state == Life.FINISHED:
            await self._end(State.COMPLETE, str(outcome.reason))
        elif outcome.reason == Reason.USER:
            await self._end(State.STOPPED, "user")
        elif outcome.reason == Reason.CLIENT_GONE:
            await self._end(State.STOPPED, "left")
        else:
            await self._end(State.FAILED, str(outcome.reason), str(exc), str(outcome.reason))

    async def _release(self, *, free: bool) -> None:
        """Save what is here; whoever attaches next reads the rest from the log.

        ``free``: nobody writes it now, so the next one need not wait for signs of life.
        """
        recording = self.recording
        self._let_go(recording)
        try:
            await self._checkpoint()
            if free:
                await database_sync_to_async(writing.abandon)(recording.message_id, recording.request_id)
        except DatabaseError:
            logger.warning("chat answer %s: last text not saved", recording.message_id)
        recording.release()

    async def _end(self, state: str, reason: str, error: str = "", code: str = "") -> None:
        recording = self.recording
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
        await self._publish()

    async def _publish(self) -> None:
        """Give watchers the answer as it is now stored; without the database, let them ask again."""
        recording = self.recording
        self._let_go(recording)
        try:
            recording.end(await database_sync_to_async(_final)(recording.message_id))
        except (DatabaseError, Message.DoesNotExist):
            recording.release()


def _final(message_id: uuid.UUID) -> dict[str, Any]:
    message = Message.objects.get(id=message_id)
    return message_json(message, sibling_ids(message))
