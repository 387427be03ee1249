"""The chat page's socket: starts answers, watches them, stops them.

Messages are JSON objects in the style of ``/ws/v1/stream`` (subprotocol
``sluice.v1``); ``id`` is the client's own reference of a stream.

====================  =======================================================================
client                server
====================  =======================================================================
                      ``hello`` (models, page) once the socket is open
``generate``          ``accepted`` (conversation, messages), then the stream
``attach`` (message)  the stream of an answer that is being written, or ``done`` at once
``cancel``            the stream ends with ``done``
``models``            ``models``
``ping``              ``pong``
====================  =======================================================================

A stream is ``queued`` (position), ``render`` (content, see ``apps.chat.live``), and at
the end ``done`` (the message as stored; failed ones too), ``detached`` (the server
lets go: attach again) or ``error``. ``changed`` tells a user's other pages that a
conversation has news; ``page`` names a page in its HTTP requests, so that it is not
told what it has changed itself.

``generate`` carries ``op``: ``send`` (text, conversation or none for a new one,
parent, settings), ``edit`` (message, text), ``regenerate`` (message), ``continue``
(message). The same ``id`` twice is one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec
from channels.db import database_sync_to_async
from django.contrib.auth import get_user_model
from django.db import DatabaseError

from apps.accounts.auth import authenticate
from apps.chat import news, offers, services, turns, writing
from apps.chat.live import Shown, complete
from apps.chat.recorder import Recorder
from apps.chat.recording import Recording
from apps.chat.serialise import conversation_json, message_json, sibling_ids
from apps.chat.services import ChatError
from apps.chat.turns import Turn
from apps.chat.writer import Caller
from inference.errors import NotServing, StoreUnavailable
from sluice import runtime
from sluice.consumers import StreamingWebSocketConsumer

logger = logging.getLogger("sluice.chat")

MIN_PAUSE = 0.05
"""Shortest time between two renderings sent to one page, seconds."""
RENDER_SHARE = 4
"""From one rendering of a stream to the next it takes this many times as long as the rendering did."""
MAX_STREAMS = 16
"""Streams of one socket."""
SIGNED_OUT = 4401
"""Close code of a socket whose session has ended."""
GOODBYE = frozenset({1000, 1001, 4001, SIGNED_OUT})
"""Close codes of a page that goes, as opposed to a connection that breaks."""
ASK_AGAIN = 3.0
"""An open stream asks this often, in seconds, whether its session still lasts."""

_recorder: Recorder | None = None


def recorder() -> Recorder:
    """This process's recorder.

    Raises:
        NotServing: the gateway is not running (yet).
    """
    global _recorder
    gateway = runtime.gateway()
    if _recorder is None or _recorder.gateway is not gateway:
        _recorder = Recorder(gateway)
    return _recorder


class ChatConsumer(StreamingWebSocketConsumer):
    """One open chat page."""

    subprotocols = ("sluice.v1",)

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[str, Recording] = {}
        self._page = ""

    async def on_open(self) -> None:
        self._page = news.join(self)
        await self.send_json({"type": "hello", "page": self._page, **offers.offered(self.principal)})

    async def on_text(self, text: str) -> None:
        try:
            message = msgspec.json.decode(text)
        except msgspec.DecodeError:
            await self._error(None, "Messages must be JSON objects.", "invalid")
            return
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            await self._error(None, "Messages must be JSON objects with a type.", "invalid")
            return
        ref = message.get("id")
        handler = {
            "generate": self._generate,
            "attach": self._attach,
            "cancel": self._cancel,
            "models": self._send_models,
            "ping": self._pong,
        }.get(message["type"])
        if handler is None:
            await self._error(ref, "Unknown message type.", "invalid")
            return
        if handler not in (self._send_models, self._pong) and not (isinstance(ref, str) and 0 < len(ref) <= 64):
            await self._error(None, "id must be text of 1 to 64 characters.", "invalid")
            return
        try:
            # A session that has ended since the page was opened reads and starts nothing.
            if handler == self._pong or await self._still_signed_in(ref):
                await handler(ref, message)
        except ChatError as exc:
            await self._error(ref, str(exc), exc.code)
        except (NotServing, StoreUnavailable) as exc:
            await self._error(ref, str(exc), "unavailable")
        except DatabaseError:
            await self._error(ref, "The database does not answer. Try again in a moment.", "unavailable")
        except ConnectionError:
            raise
        except Exception:
            # The edge of a message. Unanswered, the page would send it again, on every new socket.
            logger.exception("chat message not handled", extra={"event": "socket_error"})
            await self._error(ref, "Something went wrong on the server.", "internal")

    async def on_close(self, code: int) -> None:
        news.leave(self._page)
        # How the socket closed decides how long its answers are kept going.
        for recording in set(self._watched.values()):
            _unwatch(recording, self, lost=code not in GOODBYE)

    async def _still_signed_in(self, ref: str | None) -> bool:
        """Ask again who this is, with the rights of now; a socket whose session has ended is closed.

        Raises:
            DatabaseError: it cannot be known now.
        """
        principal = await authenticate(self.scope)
        if principal is not None and principal.user_id == self.principal.user_id:
            self.principal = principal
            return True
        await self._error(ref, "You have been signed out.", "unauthorised")
        await self.close(SIGNED_OUT, "signed out")
        return False

    # -- handlers ----------------------------------------------------------------------------

    async def _generate(self, ref: str, body: dict[str, Any]) -> None:
        if runtime.status.refusing:
            raise ChatError("This server is restarting; the page reconnects in a moment.", "shutting_down")
        if ref in self.tasks:
            return  # a double click: the first one is under way
        if len(self.tasks) >= MAX_STREAMS:
            raise ChatError("Too many answers at once.", "busy")
        keeper = recorder()
        turn, payload = await database_sync_to_async(self._start_turn)(ref, body)
        recording: Recording | None
        if turn.repeated:
            recording = keeper.join(turn.answer, self._caller())
        else:
            recording = keeper.start(turn, self._caller())
        # First, since the page may have gone: an answer is stopped only once its last watcher has left.
        self._see(ref, recording)
        news.tell(self.principal.user_id, str(turn.conversation.id), str(turn.answer.id), but=self._page)
        await self.send_json({"type": "accepted", "id": ref, **payload})
        await self._stream(ref, recording, turn.answer)

    def _start_turn(self, ref: str, body: dict[str, Any]) -> tuple[Turn, dict[str, Any]]:
        user = get_user_model().objects.get(pk=self.principal.user_id)
        model = offers.chosen(self.principal, user, body)
        turn = turns.start_turn(user, str(body.get("op", "send")), body, ref, model)
        messages = [message for message in (turn.user_message, turn.answer) if message is not None]
        return turn, {
            "conversation": conversation_json(turn.conversation),
            "messages": [message_json(message, sibling_ids(message)) for message in messages],
            "answer": str(turn.answer.id),
        }

    async def _attach(self, ref: str, body: dict[str, Any]) -> None:
        if ref in self.tasks:
            return
        keeper = recorder()
        user = await get_user_model().objects.aget(pk=self.principal.user_id)
        message = await database_sync_to_async(services.get_message)(user, body.get("message"))
        recording = keeper.join(message, self._caller())
        self._see(ref, recording)
        await self._stream(ref, recording, message)
        if recording is not None:
            # A hold ends by itself, too; that it could not be ended now is no error of the stream that runs.
            with contextlib.suppress(DatabaseError):
                await database_sync_to_async(writing.unhold)(message.id)

    async def _cancel(self, ref: str, body: dict[str, Any]) -> None:
        keeper = recorder()
        recording = self._watched.get(ref)
        if recording is not None:
            await keeper.stop(recording)
        elif body.get("message"):
            user = await get_user_model().objects.aget(pk=self.principal.user_id)
            message = await database_sync_to_async(services.get_message)(user, body["message"])
            await keeper.stop_message(message)

    async def _send_models(self, ref: str, body: dict[str, Any]) -> None:
        await self.send_json({"type": "models", **offers.offered(self.principal)})

    async def _pong(self, ref: Any, body: dict[str, Any]) -> None:
        await self.send_json({"type": "pong", "id": ref})

    # -- streams -----------------------------------------------------------------------------

    def _see(self, ref: str, recording: Recording | None) -> None:
        """Become a watcher, until the stream has ended or the socket is closed, whether or not it is ever shown."""
        if recording is not None:
            self._watched[ref] = recording
            recorder().watch(recording, self)

    async def _stream(self, ref: str, recording: Recording | None, answer: Any) -> None:
        if recording is None:
            payload = await database_sync_to_async(_stored)(answer)
            await self.send_json({"type": "done", "id": ref, "message": payload})
            return
        self.spawn(ref, self._watch(ref, recording))

    async def _watch(self, ref: str, recording: Recording) -> None:
        try:
            await self._show(ref, recording)
        finally:
            if self.open:  # else on_close does it, also for streams that were cancelled before they began
                del self._watched[ref]
                if recording not in self._watched.values():
                    _unwatch(recording, self, lost=False)

    async def _show(self, ref: str, recording: Recording) -> None:
        shown = Shown()
        position: int | None = None
        asked = time.monotonic()
        while True:
            version = recording.version
            if time.monotonic() - asked > ASK_AGAIN:
                asked = time.monotonic()
                # While the database is away nobody can sign out either.
                with contextlib.suppress(DatabaseError):
                    if not await self._still_signed_in(ref):
                        return
            if recording.final is not None:
                final = dict(recording.final)
                final["content"] = shown.advance(await runtime.offload(complete, final["text"]))
                await self.send_json({"type": "done", "id": ref, "message": final})
                news.tell(recording.user_id, str(recording.conversation_id), None, but=self._page)
                return
            if recording.released:
                await self.send_json({"type": "detached", "id": ref})
                return
            if recording.position is not None and recording.position != position:
                await self.send_json({"type": "queued", "id": ref, "position": recording.position})
            position = recording.position
            begin = time.monotonic()
            content = shown.advance(await recording.show())
            if content is not None:
                await self.send_json(
                    {
                        "type": "render",
                        "id": ref,
                        "seq": recording.seq,
                        "content": content,
                        "tokens": recording.tokens,
                        "tokens_per_second": recording.tokens_per_second,
                    }
                )
                pause = max(MIN_PAUSE, RENDER_SHARE * recording.render_seconds)
                await asyncio.sleep(max(0.0, begin + pause - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                # Not for longer: the session may end while nothing changes, as in a queue.
                async with asyncio.timeout(ASK_AGAIN):
                    await recording.wait_change(version)

    # -- helpers -----------------------------------------------------------------------------

    def _caller(self) -> Caller:
        client = (self.scope.get("client") or ["", 0])[0]
        return Caller(
            user_id=self.principal.user_id,
            owner=self.principal.owner,
            client=client,
            quotas=self.principal.quotas,
        )

    async def _error(self, ref: Any, message: str, code: str) -> None:
        ref = ref if isinstance(ref, str) else None
        await self.send_json({"type": "error", "id": ref, "error": {"message": message, "code": code}})


def _unwatch(recording: Recording, watcher: object, *, lost: bool) -> None:
    try:
        recorder().unwatch(recording, watcher, lost=lost)
    except NotServing:
        pass  # the process ends, and every request with it or past it


def _stored(message: Any) -> dict[str, Any]:
    message.refresh_from_db()
    return message_json(message, sibling_ids(message))
