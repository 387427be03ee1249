"""The worker's loop: claim what the engine can start, stream what it gives, let go of what ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import msgspec

from inference import metrics, tracing
from inference.config import Config
from inference.engine.base import EngineOutput
from inference.errors import EngineDied, Overloaded, SluiceError, StoreUnavailable, TooLarge
from inference.messages import Abort, Moved, WorkerBeat, WorkerCommand, decode_worker_message
from inference.redisio import Commander, Subscriber, connect
from inference.store import RequestStore
from inference.store.records import Claim
from inference.store.store import Append
from inference.ticks import until_tick
from inference.worker.heartbeat import Heartbeat, Identity, Served
from inference.worker.outbox import Outbox
from inference.worker.sequence import Sequence
from inference.worker.upkeep import Upkeep

logger = logging.getLogger("sluice.worker")

_HEAD_START = 0.001
_LONGEST_HEAD_START = 0.01
"""Seconds by which a worker holds back a claim, per request that it holds, and at most."""


class Worker:
    """Runs in the worker process's event loop; see ``__main__.py`` for the process itself.

    ``on_beat`` is called with every heartbeat (the supervisor's watchdog
    listens to it); ``on_fatal`` when the process must end.
    """

    def __init__(
        self,
        worker_id: str,
        config: Config,
        *,
        pool: str,
        device: str,
        aliases: Seq[str],
        restarts: int = 0,
        on_beat: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.id = worker_id
        self.config = config
        self.state = "starting"
        metrics.know(list(aliases))
        self._identity = Identity(worker_id, pool, device, list(aliases), restarts, int(time.time() * 1000))
        self._on_fatal = on_fatal
        self._models: dict[str, Served] = {}
        self._held: dict[str, Sequence] = {}
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._loose: set[asyncio.Task[None]] = set()
        self._stopping = False
        dial = lambda: connect(config.redis_url, timeout=config.redis_timeout, client_name=f"sluice-{worker_id}")  # noqa: E731
        self.redis = Commander(dial, name=worker_id)
        self.store = RequestStore(self.redis, config)
        self._outbox = Outbox(self.store, worker_id, self._odd, self._watch)
        self._heartbeat = Heartbeat(self.store, config, self.beat, on_beat, self._loosely)
        self._upkeep = Upkeep(
            self.store,
            worker_id,
            interval=config.check_interval,
            held=self._held.keys,
            unsent=self._outbox.ids,
            abort=self._abort,
        )
        k = self.store.keys
        self._subscriber = Subscriber(
            dial,
            [k.worker_channel(worker_id), *(k.wake_channel(a) for a in aliases)],
            self._message,
            self._wake.set,
            timeout=config.redis_timeout,
            name=worker_id,
        )

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to beat (as ``starting``)."""
        self.redis.start()
        self._beats = self._spawn(self._heartbeat.run(), "beats")

    async def serve(self, models: dict[str, Served]) -> None:
        """Announce the models and claim requests until :meth:`drain` is done."""
        self._models.update(models)
        self.state = "ready"
        self._outbox.start()
        self._subscriber.start()
        await self._heartbeat.try_to_send()
        self._spawn(self._claims(), "claims")
        self._spawn(self._upkeep.run(), "checks")

    async def drain(self, timeout: float) -> None:
        """Stop claiming; finish what is held within ``timeout`` seconds, hand the rest back."""
        self.state = "draining"
        try:
            async with asyncio.timeout(timeout):
                await self._heartbeat.send()
                await self._empty.wait()
                await self._outbox.wait_flushed()
        except TimeoutError:
            await self._hand_back()
        except StoreUnavailable:
            logger.warning("draining without Redis", extra={"event": "drain_blind"})

    async def stop(self) -> None:
        """Leave: nothing is claimed or held any more."""
        self._stopping = True
        await _end(task for task in self._tasks if task is not self._beats)
        await self._outbox.stop()
        await self._subscriber.stop()
        for served in self._models.values():
            await served.engine.close()
        await _end([self._beats])  # last: closing takes a while, and who falls silent is taken for frozen
        try:
            async with asyncio.timeout(1.0):
                await self._heartbeat.withdraw(self.id)
        except (StoreUnavailable, TimeoutError):
            logger.info("leaving without a word: Redis does not answer")
        await self.redis.stop()

    async def _hand_back(self) -> None:
        """Put everything held back into the queue; another worker goes on from the log."""
        held = dict(self._held)
        self._held.clear()
        for request_id, seq in held.items():
            self._models[seq.job.model].engine.abort(request_id)
        try:
            async with asyncio.timeout(5.0):
                await self._outbox.wait_flushed()
                for request_id in held:
                    await self.store.requeue(request_id, worker=self.id, lost=False)
        except (StoreUnavailable, TimeoutError):
            logger.warning("could not hand back %d requests; a reaper does", len(held))
        self._empty.set()

    def _spawn(self, coro: object, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coro, name=name)  # type: ignore[arg-type]
        task.add_done_callback(self._watch)
        self._tasks.append(task)
        return task

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._stopping:
            error = task.exception()
            assert error is not None
            logger.critical("the worker's task %s has failed", task.get_name(), exc_info=error)
            self._on_fatal(error)

    def beat(self) -> WorkerBeat:
        """The heartbeat of this moment."""
        return self._identity.beat(self.state, self._models, len(self._held))

    @property
    def strays(self) -> int:
        """Requests found that named this worker without its knowing: none, unless replies were lost."""
        return self._upkeep.strays

    # -- claiming ----------------------------------------------------------------------------------

    async def _claims(self) -> None:
        while True:
            self._wake.clear()
            # The busier a worker is, the longer it lets others go first: load spreads evenly
            # without anybody keeping count of it.
            await asyncio.sleep(min(_HEAD_START * len(self._held), _LONGEST_HEAD_START))
            if self.state == "ready":
                for alias, served in self._models.items():
                    await self._claim(alias, served)
            # The message that says "there is work" is a hint; this poll covers its loss.
            try:
                async with asyncio.timeout(until_tick(self.config.check_interval)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _claim(self, alias: str, served: Served) -> None:
        free = served.engine.free_slots()
        while free > 0 and self.state == "ready":
            try:
                # One at a time, so that workers take turns where much is waiting.
                claims = await self.store.claim(alias, self.id, 1)
            except StoreUnavailable:
                return
            refused = [c for c in claims if not self._start(c, served)]
            for claim in refused:
                await self._upkeep.unclaim(claim.id)
            if not claims or refused:
                return
            free = served.engine.free_slots()

    def _start(self, claim: Claim, served: Served) -> bool:
        """Hand a claimed request to the engine; false where it has no room just now."""
        # An earlier attempt, where this worker was cut off, taken for dead, and is the next to claim it.
        self._abort(claim.id)
        seq = Sequence(claim, served.tokenizer)
        params = claim.job.params
        if seq.logged_finish is not None:
            return True
        if seq.stop_found or 0 < params.max_tokens <= seq.tokens:
            self._outbox.put([seq.close("stop" if seq.stop_found else "length")])
            return True
        if not served.engine.fits(claim.job, seq.tokens) and self._held:
            return False
        seq.trace = tracing.work(claim, self.id)
        self._held[claim.id] = seq
        self._empty.clear()
        try:
            served.engine.submit(claim.job, seq.resumed)
        except Overloaded:
            self._forget(claim.id)
            return False
        except (TooLarge, SluiceError) as exc:
            if isinstance(exc, EngineDied):
                raise
            self._forget(claim.id)
            self._outbox.put([seq.close("error", str(exc))])
        return True

    # -- what the engine gives -----------------------------------------------------------------------

    def sink(self, alias: str) -> Callable[[Seq[EngineOutput]], None]:
        """The engine's sink for one model."""

        def take(outputs: Seq[EngineOutput]) -> None:
            frames = []
            ended = False
            for output in outputs:
                seq = self._held.get(output.id)
                if seq is None:
                    continue
                frame = seq.take(output)
                if frame is not None:
                    frames.append(frame)
                if seq.finished:
                    ended = True
                    if output.finish is None:
                        self._models[alias].engine.abort(output.id)
                    self._forget(output.id)
            self._outbox.put(frames)
            served = self._models[alias]
            served.steps.tick(served.engine.stats())
            if ended:
                self._wake.set()

        return take

    def died(self, error: BaseException) -> None:
        """The engine can not go on: neither can this process."""
        logger.critical(
            "the engine has died with %d requests: %s",
            len(self._held),
            type(error).__name__,
            exc_info=error,
            extra={"event": "engine_died", "request_ids": sorted(self._held)},
        )
        self._on_fatal(error)

    def _forget(self, request_id: str) -> None:
        seq = self._held.pop(request_id, None)
        if seq is not None:
            seq.trace.end(tokens=seq.tokens, finish=seq.finish)
        if not self._held:
            self._empty.set()

    def _abort(self, request_id: str) -> None:
        seq = self._held.get(request_id)
        if seq is not None:
            self._models[seq.job.model].engine.abort(request_id)
            self._outbox.drop(request_id)
            self._forget(request_id)
            self._wake.set()

    # -- what others say -----------------------------------------------------------------------------

    def _message(self, channel: str, data: bytes) -> None:
        if not data:
            self._wake.set()
            return
        try:
            message = decode_worker_message(data)
        except msgspec.MsgspecError:
            logger.error("an unreadable message of %d bytes arrived", len(data), extra={"event": "bad_message"})
            return
        match message:
            case Abort():
                seq = self._held.get(message.id)
                if seq is not None and seq.attempt == message.attempt:
                    self._abort(message.id)
            case Moved():
                if message.id in self._held:
                    self._held[message.id].server = message.server
            case WorkerCommand():
                self._command(message.verb)

    def _command(self, verb: str) -> None:
        logger.warning("an operator says: %s", verb, extra={"event": "worker_command"})
        if verb == "quiet" and self.state == "ready":
            self.state = "quiet"
        elif verb == "resume" and self.state == "quiet":
            self.state = "ready"
            self._wake.set()
        elif verb in ("drain", "restart"):
            self.on_command(verb)

    def on_command(self, verb: str) -> None:
        """``drain`` or ``restart``; the process overrides this."""

    def _odd(self, frame: Append, word: str, server: str) -> None:
        seq = self._held.get(frame.id)
        if word == "stale":
            if seq is not None and seq.attempt == frame.attempt:  # else it has been claimed once more meanwhile
                self._abort(frame.id)
        elif word == "gap":
            # Goes back to the queue, and on from what its log still has.
            self._abort(frame.id)
            self._loosely(self._upkeep.unclaim(frame.id))
        elif word == "moved" and seq is not None:
            seq.server = server
        elif word == "detached":
            self._loosely(self._upkeep.settle_detached(frame.id))

    def _loosely(self, coro: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coro)  # type: ignore[arg-type]
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)
        return task


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
