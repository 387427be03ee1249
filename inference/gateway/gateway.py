"""One API process's door to the workers. See ``docs/ARCHITECTURE.md`` for the trace of a request."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

from inference import metrics
from inference.config import Config, host_name
from inference.errors import NotFound, NotServing, Refused, StoreUnavailable, TooLarge, UnknownModel
from inference.gateway.ended import Detached, RequestEnded
from inference.gateway.hub import Hub
from inference.gateway.leaving import Leaving
from inference.gateway.ledger import Ledger
from inference.gateway.presence import Presence
from inference.gateway.questions import Questions
from inference.gateway.sampler import Sampler
from inference.gateway.settler import Settler
from inference.gateway.stream import RequestStream
from inference.lifecycle import Outcome, Reason, State
from inference.messages import (
    Ending,
    ModelInfo,
    ServerBeat,
    ServerCommand,
    WorkerCommand,
    encode,
)
from inference.reaper import Reaper
from inference.redisio import Commander, connect
from inference.store import RequestStore, StoreViews, Submission
from inference.store.series import Series
from inference.version import VERSION

logger = logging.getLogger("sluice.gateway")

_UNSERVED_LIMIT = 20.0
"""Seconds without a worker, or one on its way, after which a model's waiting requests end."""


class Gateway(Questions):
    """Submits requests, streams them, and ends every one exactly once.

    ``on_beat`` adds what only the server knows (exchanges, drain) to its
    heartbeat; ``on_ending`` sees the summary of each request that this process
    settled; ``on_accepted`` each submission that was stored; ``on_stream`` each
    stream whose reader is done; ``on_command`` receives an operator's ``drain`` / ``undrain``.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_beat: Callable[[], dict[str, Any]] | None = None,
        on_ending: Callable[[Ending], None] | None = None,
        on_accepted: Callable[[Submission], None] | None = None,
        on_stream: Callable[[RequestStream], None] | None = None,
        on_command: Callable[[str], None] | None = None,
    ) -> None:
        self.id = f"s-{secrets.token_hex(5)}"
        self.config = config
        self.state = "serving"
        self._on_beat = on_beat or dict
        self._on_stream = on_stream or (lambda stream: None)
        self._on_command = on_command or (lambda verb: None)
        self._started_ms = int(time.time() * 1000)
        self._aliases = [s.alias for s in config.model_specs()]
        metrics.know(self._aliases)
        dial = lambda: connect(config.redis_url, timeout=config.redis_timeout, client_name=f"sluice-{self.id}")  # noqa: E731
        self.redis = Commander(dial, name=self.id)
        self.store = RequestStore(self.redis, config)
        self.views = StoreViews(self.redis, self.store.keys)
        self._ledger = Ledger(self.store, self.id, on_accepted=on_accepted, on_ending=on_ending)
        self.settler = Settler(self.store, self.id, self._ledger.ended)
        self._leaving = Leaving(self.store, self.redis, self.settler, self._ledger, config)
        self.presence = Presence(self.store, self.views, self.id, self._beat)
        self.reaper = Reaper(self.store, self.views, self._ledger.ended)
        self._series = Series(self.redis, self.store.keys)
        self._sampler = Sampler(self._series, lambda: self.presence.workers)
        self._hub = Hub(
            self.store, dial, self.id, on_command=self._command, on_stray=self._stray, on_tick=self._end_unserved
        )
        self._started = False
        self.strays = 0
        """Requests found without a stream or a note: none, unless commands arrived late."""

    # -- life of the process ---------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and begin to beat.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        if self._started:
            return
        self._started = True
        self.redis.start()
        try:
            await self.redis.call("PING")
        except StoreUnavailable:
            self._started = False
            await self.redis.stop()
            raise
        self.settler.start()
        self._hub.start()
        await self._hub.wait_connected()
        await self.presence.beat()
        self.presence.start()
        self.reaper.start()
        await self.presence.wait_refreshed()
        self._sampler.start()

    async def stop(self, timeout: float = 10.0) -> int:
        """End what is open, wait for the settler, leave. Gives the number of requests left unsettled."""
        if not self._started:
            return 0
        self._started = False
        await self.end_streams()
        left = await self.settler.stop(timeout)
        await self._ledger.close()
        await self._sampler.stop()
        await self.reaper.stop()
        await self.presence.stop()
        await self._hub.stop()
        try:
            async with asyncio.timeout(1.0):
                await self.presence.remove()
        except (StoreUnavailable, TimeoutError):
            logger.info("leaving without a word: Redis does not answer")
        await self.redis.stop()
        return left

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def set_state(self, state: str) -> None:
        """The drain state that the heartbeat shows (see :class:`ServerBeat`)."""
        self.state = state

    async def end_streams(self) -> None:
        """The last phase of a drain: resumable requests are detached, the others end as shutdown."""
        for stream in self._hub.streams():
            if stream.resumable:
                stream.end(Detached("The server is shutting down; attach again elsewhere.", superseded=False))
            else:
                stream.cancel(Reason.SHUTDOWN)
        await asyncio.sleep(0)

    def open_ids(self) -> list[str]:
        """Requests that this server streams now."""
        return [s.id for s in self._hub.streams()]

    def streams(self) -> list[RequestStream]:
        return self._hub.streams()

    # -- requests --------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(self, spec: Submission) -> AsyncIterator[RequestStream]:
        """Submit a request and stream it; leaving the block, in whatever way, ends it.

        Raises:
            UnknownModel, NotServing, TooLarge, Overloaded, StoreUnavailable:
                before anything was stored.
        """
        try:
            info = self._admit(spec)
        except Refused as exc:
            self._ledger.refused(spec, exc)
            raise
        trace, spec = self._ledger.begin(spec)
        stream = RequestStream(
            spec.job.id,
            spec.job,
            read_log=self.store.read_log,
            buffer=self.config.stream_buffer,
            resumable=spec.resumable,
        )
        stream.position = lambda: self.views.position(spec.job.model, spec.job.id)
        self._hub.add(stream)
        submitted = self.store.submit(spec, server=self.id, slots=info.slots if info else 0)
        submitted.add_done_callback(lambda done: self._ledger.accepted(spec, done))
        failure: BaseException | None = None
        try:
            # Shielded: whether it was accepted is still to be known when this reader is gone.
            stream.created_ms, _ = await asyncio.shield(submitted)
            stream.admit()
            yield stream
        except BaseException as exc:
            failure = exc  # how the block is left decides the outcome
            raise
        finally:
            self._hub.remove(stream)
            self._on_stream(stream)
            trace.read(stream)
            accepted = not (submitted.done() and not submitted.cancelled() and _refused(submitted))
            if accepted:
                await self._leaving.leave(stream, failure, submitted)
            else:
                self._ledger.forget(stream.id)

    def _admit(self, spec: Submission) -> ModelInfo | None:
        alias = spec.job.model
        if alias not in self._aliases:
            raise UnknownModel(f"There is no model named {alias!r} here.")
        info = self.presence.models().get(alias)
        if info is None:
            if not self.presence.coming(alias):
                raise NotServing(f"No worker serves {alias!r} at the moment.", retry_after=5.0)
            return None
        need = len(spec.job.prompt_ids) + spec.job.params.max_tokens
        if need > info.capacity_tokens:
            raise TooLarge(f"Prompt and answer need {need} tokens; at most {info.capacity_tokens} can be served.")
        return info

    @asynccontextmanager
    async def attach(self, request_id: str, *, after_seq: int = 0, owner: str = "") -> AsyncIterator[RequestStream]:
        """Take over the stream of a resumable request after frame ``after_seq``.

        ``owner`` must match unless empty. A request that has ended within the
        retention time is replayed from its log.

        Raises:
            NotFound: unknown, not resumable, another owner's, or no longer retained.
            StoreUnavailable: Redis does not answer.
        """
        reader = secrets.token_hex(6)
        stream = RequestStream(
            request_id, None, read_log=self.store.read_log, buffer=self.config.stream_buffer, after=after_seq,
            attached=True, resumable=True, reader=reader,
        )  # fmt: skip
        self._hub.add(stream)
        failure: BaseException | None = None
        attached: Any = None
        call = asyncio.ensure_future(self.store.attach(request_id, server=self.id, reader=reader, owner=owner))
        try:
            attached = await asyncio.shield(call)
            if isinstance(attached, str):
                await self._retained(stream, attached, owner)
            else:
                stream.admit(attached.turn)
                self._hub.overtaken(request_id, attached.turn)  # a reader here need not wait for the message
                stream.job, stream.created_ms = attached.job, attached.created_ms
                stream.phase = "queued" if attached.state == State.QUEUED else "running"
                stream.attempt = attached.attempt
                stream.position = lambda: self.views.position(attached.model, request_id)
            stream.clamp(int(await self.redis.call("LLEN", self.store.keys.log(request_id))))
            yield stream
        except BaseException as exc:
            failure = exc  # how the block is left decides the outcome
            raise
        finally:
            self._hub.remove(stream)
            self._on_stream(stream)
            if not isinstance(attached, str) and not isinstance(failure, NotFound):
                if attached is None:
                    await asyncio.wait([call])
                await self._leaving.leave(stream, failure, None)

    async def _retained(self, stream: RequestStream, word: str, owner: str) -> None:
        ending = await self.store.ending(stream.id) if word == "gone" else None
        if ending is None or (owner and ending.owner != owner):
            raise NotFound(f"There is no request {stream.id} to attach to.")
        stream.created_ms = ending.created_ms
        stream.outcome = Outcome(State(ending.state), Reason(ending.reason))
        if ending.state != State.FINISHED:
            stream.closing = RequestEnded(stream.outcome)

    async def cancel(self, request_id: str, reason: Reason, *, guard: tuple[str, str] | None = None) -> Outcome | None:
        """End a request of any server. ``None`` where it is not alive (any more); idempotent."""
        outcome = Outcome.cancelled(reason)
        # Told like any other server, since the stream may be ours.
        ending = await self.store.settle(request_id, outcome, guard=guard)
        if ending is None:
            return None
        self._ledger.ended(ending)
        return outcome

    async def command_worker(self, worker: str, verb: Literal["quiet", "resume", "drain", "restart"]) -> bool:
        """An operator's order to a worker; whether anybody heard it."""
        return await self.store.tell_worker(worker, encode(WorkerCommand(verb))) > 0

    async def command_server(self, server: str, verb: Literal["drain", "undrain"]) -> bool:
        """An operator's order to a server; whether anybody heard it."""
        return await self.store.tell_server(server, encode(ServerCommand(verb))) > 0

    # -- parts -----------------------------------------------------------------------------------

    def _beat(self) -> ServerBeat:
        extra = self._on_beat()
        return ServerBeat(
            id=self.id,
            host=host_name(),
            pid=os.getpid(),
            state=extra.pop("state", self.state),
            exchanges=extra.pop("exchanges", {}),
            streams=len(self._hub.streams()),
            unsettled=self.settler.pending,
            tasks=len(asyncio.all_tasks()),
            started_ms=self._started_ms,
            version=VERSION,
            blocked=self._hub.blocked(),
            **extra,
        )

    def _stray(self, request_id: str) -> None:
        """A record names this server, which neither streams it nor is about to end it.

        So it is when a command reaches Redis long after its connection was given
        up (packets held back, a server thawed): a submit behind its own settle.
        """
        if not self.settler.knows(request_id):
            self.strays += 1
            logger.warning("request %s is nobody's here: ending it", request_id, extra={"event": "stray_request"})
            self.settler.put(request_id, Outcome.cancelled(Reason.CLIENT_GONE), grace=self.config.resume_grace)

    def _end_unserved(self) -> None:
        """Nobody can claim what waits for a model whose last pool has gone: say so soon, not at its deadline."""
        for stream in self._hub.streams():
            if stream.phase == "queued" and stream.admitted and stream.job is not None:
                alias = stream.job.model
                if self.presence.unserved_for(alias) > _UNSERVED_LIMIT:
                    stream.end(
                        RequestEnded(Outcome.failed(Reason.WORKER_LOST), f"No worker serves {alias!r} any more.")
                    )

    def _command(self, message: ServerCommand) -> None:
        self._on_command(message.verb)


def _refused(submitted: asyncio.Future[Any]) -> bool:
    """Whether the store said no. A lost reply is no refusal: the request may be stored."""
    error = submitted.exception()
    return error is not None and not isinstance(error, StoreUnavailable)
