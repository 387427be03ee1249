"""``/ws/v1/stream``: several generations at once on one WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from typing import Any

import msgspec

from apps.accounts.auth import renewed
from apps.api import plan
from apps.api.errors import ApiError, from_refusal, invalid
from apps.api.generation import Generation
from apps.api.reattached import Reattached
from apps.api.schema.base import Decoder
from apps.api.schema.socket import (
    Reference,
    SocketAttach,
    SocketCancel,
    SocketGenerate,
    SocketMessage,
    SocketPing,
)
from inference.errors import Refused, SluiceError, StoreUnavailable
from inference.lifecycle import Reason
from sluice import conf, runtime
from sluice.consumers import HttpError, StreamingWebSocketConsumer

PROTOCOL = "sluice.v1"
MAX_GENERATIONS = 32
BURST = 2000
RATE = 200.0
IDLE_SECONDS = 900.0

TIMEOUT, TOO_BIG, TOO_MANY = 4408, 1009, 4429

decode: Decoder[Any] = Decoder(SocketMessage)  # type: ignore[arg-type]


class _Referring(msgspec.Struct):
    """As much of a message as an error needs."""

    id: Reference | None = None


_TEXT = r'"(?:[^"\\]|\\.)*+"'
#: A reference that comes before everything but plain texts and numbers.
_LEADING = re.compile(rf'\ufeff?\s*{{\s*(?:{_TEXT}\s*:\s*(?:{_TEXT}|[\w.+-]++)\s*,\s*)*?("id"\s*:\s*{_TEXT})')


def _reference_in(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=_Referring).id
    except (msgspec.DecodeError, RecursionError):
        pass
    # Clients write what is no strict JSON, NaN, half a surrogate pair or a byte order mark, and want to know whose end
    # it is. Of what is nested too deeply only the beginning is read.
    with contextlib.suppress(ValueError, msgspec.ValidationError):
        try:
            whole = json.loads(text.removeprefix("\ufeff"))
        except RecursionError:
            found = _LEADING.match(text)
            whole = json.loads(f"{{{found[1]}}}") if found else None
        ref = msgspec.convert(whole, _Referring).id
        if ref is not None and ref.encode():
            return ref
    return None


class StreamConsumer(StreamingWebSocketConsumer):
    """Speaks ``sluice.v1``; the messages are described in ``docs/api.md`` and ``/asyncapi.json``."""

    subprotocols = (PROTOCOL,)

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, Generation] = {}
        self._cancelled: set[str] = set()
        self._credit = float(BURST)
        self._counted = time.monotonic()
        self._heard = time.monotonic()
        self._watch: asyncio.TimerHandle | None = None

    async def authorize(self) -> Any:
        offered = [p for p in self.scope.get("subprotocols", []) if not p.startswith("sluice.ticket.")]
        if offered and PROTOCOL not in offered:
            raise HttpError(400, f"The subprotocol of this socket is {PROTOCOL}.", code="unknown_subprotocol")
        principal = await super().authorize()
        if not principal.may("generate"):
            raise HttpError(403, "This key lacks the scope 'generate'.", code="insufficient_scope")
        return principal

    async def on_open(self) -> None:
        self._watch_idle()

    async def on_close(self, code: int) -> None:
        if self._watch is not None:
            self._watch.cancel()

    # --- messages in ------------------------------------------------------------------

    async def on_text(self, text: str) -> None:
        if not await self._allowed(len(text)):
            return
        try:
            message = decode(text.encode())
        except ApiError as exc:
            await self._error(self._reference(text), exc)
            return
        if isinstance(message, SocketPing):
            await self.send_json({"type": "pong", "id": message.id})
        elif isinstance(message, SocketCancel):
            await self._cancel(message.id)
        else:
            await self._begin(message)

    def _reference(self, text: str) -> str | None:
        """The reference in a message that is wrong otherwise, unless it is that of a running generation."""
        ref = _reference_in(text)
        return None if ref in self.tasks else ref

    async def on_bytes(self, data: bytes) -> None:
        if await self._allowed(len(data)):
            await self._error(None, invalid("Send text messages; binary ones are not read.", code="unsupported_data"))

    async def on_error(self, exc: Exception) -> None:
        await self._error(None, exc)

    async def _allowed(self, size: int) -> bool:
        """Size and rate; where they are exceeded the socket is closed."""
        now = self._heard = time.monotonic()
        self._credit = min(float(BURST), self._credit + (now - self._counted) * RATE) - 1.0
        self._counted = now
        if size > conf.server_config().ws_max_message_bytes:
            await self.close(TOO_BIG, "message too big")
            return False
        if self._credit < 0:
            await self.close(TOO_MANY, "too many messages")
            return False
        return True

    async def _begin(self, message: SocketGenerate | SocketAttach) -> None:
        if message.id in self.tasks:
            await self._error(message.id, ApiError(409, "A generation of this id is running.", code="duplicate_id"))
        elif len(self.tasks) >= MAX_GENERATIONS:
            text = f"At most {MAX_GENERATIONS} generations run at once on one socket."
            await self._error(message.id, ApiError(429, text, code="too_many_generations", retry_after=1.0))
        else:
            work = self._generate(message) if isinstance(message, SocketGenerate) else self._attach(message)
            self.spawn(message.id, self._guard(message.id, work))
            # Let it begin before the next message is read: a task that is cancelled before says nothing of its end.
            await asyncio.sleep(0)

    async def _cancel(self, ref: str) -> None:
        generation = self.running.get(ref)
        if ref not in self.tasks:
            await self._error(ref, ApiError(404, "No generation of this id is running.", code="not_found"))
        elif generation is not None:
            self._cancelled.add(ref)
            for stream in generation.streams:
                stream.cancel(Reason.USER)
        else:
            # Its prompt is still being prepared: nothing has been submitted.
            self._cancelled.add(ref)
            self.cancel(ref)

    # --- generations ------------------------------------------------------------------

    async def _check_caller(self) -> None:
        """A revoked key or a disabled user starts nothing more on a socket that is still open."""
        now = await renewed(self.principal)
        if now is None:
            await self.close(4401, "no longer authorised")
            raise ApiError(401, "This key or user is no longer valid.", code="invalid_api_key")
        self.principal = now  # the admin scope may have gone, the limits may be others

    async def _guard(self, ref: str, work: Any) -> None:
        """The edge of a generation's task: whatever happens, the client hears of it."""
        try:
            await work
        except asyncio.CancelledError:
            if ref not in self._cancelled or not self.open:
                raise
            await self.send_json({"type": "done", "id": ref, "finish_reason": "cancelled"})
        except (ApiError, SluiceError) as exc:
            await self._error(ref, exc)
        except ConnectionError:
            raise
        except Exception as exc:
            # The edge of the task: its client gets an answer, and what owns the task logs the fault.
            await self._error(ref, exc)
            raise
        finally:
            self._cancelled.discard(ref)
            self.running.pop(ref, None)
            self._heard = time.monotonic()

    async def _generate(self, message: SocketGenerate) -> None:
        if runtime.status.refusing:
            raise ApiError(
                503,
                "This server is shutting down; connect again.",
                code="shutting_down",
                retry_after=float(runtime.status.retry_after()),
            )
        await self._check_caller()
        if message.stream is False:
            raise invalid("Answers are always streamed on a WebSocket.", "stream", "unsupported_parameter")
        made = await plan.generate(message, self.principal, endpoint="ws")
        peer = self.scope.get("client")
        generation = Generation(made, self.principal, client=str(peer[0]) if peer else "", transport="ws")
        await self._run(message.id, generation, 0)

    async def _attach(self, message: SocketAttach) -> None:
        await self._check_caller()
        try:
            await self._run(message.id, Reattached(message.request_id, self.principal), message.after or 0)
        except ApiError as exc:
            if exc.code == "request_not_found":
                exc.param = "request_id"  # here, "id" is the client's own reference
            raise

    async def _run(self, ref: str, generation: Generation, after: int) -> None:
        try:
            async with generation:
                self.running[ref] = generation
                made = generation.plan
                await self.send_json({"type": "accepted", "id": ref, "request_id": made.id, "model": made.model})
                await self._tell_queue(ref, generation)
                while not generation.done:
                    batch = await generation.next()
                    for _, delta in batch:
                        if delta.seq > after and delta.text:
                            await self.send_json({"type": "delta", "id": ref, "seq": delta.seq, "text": delta.text})
                    if not batch:
                        await self._tell_queue(ref, generation)
        except ApiError:
            if ref not in self._cancelled:
                raise
        choice = generation.choices[0]
        await self.send_json(
            {
                "type": "done",
                "id": ref,
                "finish_reason": choice.finish or "cancelled",
                "stop_reason": choice.stop_match,
                "usage": generation.usage().to_dict(),
                "timings": generation.timings(),
            }
        )

    async def _tell_queue(self, ref: str, generation: Generation) -> None:
        state = await generation.queue_state()
        if state is not None:
            await self.send_json({"type": "queued", "id": ref, "position": state[0], "estimate_s": round(state[1], 1)})

    # --- parts ------------------------------------------------------------------------

    async def _error(self, ref: str | None, exc: Exception) -> None:
        if isinstance(exc, (Refused, StoreUnavailable)):
            exc = from_refusal(exc, "", 2.0)
        if not isinstance(exc, ApiError):
            exc = ApiError(500, "The server failed on this message.", code="internal_error")
        out: dict[str, Any] = {"type": "error", "id": ref, **exc.payload(), "status": exc.status}
        if exc.retry_after is not None:
            out["retry_after"] = round(exc.retry_after, 1)
        await self.send_json(out)

    def _watch_idle(self) -> None:
        """Close a socket that has neither said anything nor had anything to do for long."""
        left = self._heard + IDLE_SECONDS - time.monotonic()
        if left <= 0 and self.idle:
            self._closing = asyncio.get_running_loop().create_task(self.close(TIMEOUT, "idle for too long"))
            return
        self._watch = asyncio.get_running_loop().call_later(max(left, 1.0), self._watch_idle)
