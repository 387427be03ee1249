"""The worker's loop: claim what the engine can start, stream what it gives, let go of what ended."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec

from inference import metrics, tracing
from inference.config import Config, host_name
from inference.endings import log_ending
from inference.engine.base import Engine, EngineOutput
from inference.errors import EngineDied, Overloaded, SluiceError, StoreUnavailable, TooLarge
from inference.lifecycle import Outcome, Reason
from inference.messages import (
    Abort,
    Ending,
    EngineStats,
    ModelInfo,
    Moved,
    WorkerBeat,
    WorkerCommand,
    decode_worker_message,
    encode,
)
from inference.redisio import Commander, Subscriber, connect
from inference.store import RequestStore
from inference.store.records import Claim
from inference.text import TokenBytes
from inference.version import VERSION
from inference.worker.outbox import Outbox
from inference.worker.sequence import Sequence
from inference.worker.usage import device_bytes, resident_bytes

logger = logging.getLogger("sluice.worker")


_HEAD_START = 0.001
_LONGEST_HEAD_START = 0.01
"""Seconds by which a worker holds back a claim, per request that it holds, and at most."""


class Served:
    """One model of this worker."""

    __slots__ = ("engine", "info", "steps", "tokenizer")

    def __init__(self, engine: Engine, info: ModelInfo, tokenizer: TokenBytes | None) -> None:
        self.steps = metrics.StepClock(info.alias)
        self.engine = engine
        self.info = info
        self.tokenizer = tokenizer


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
        self._pool = pool
        self._device = device
        self._aliases = list(aliases)
        metrics.know(self._aliases)
        self._restarts = restarts
        self._on_beat = on_beat
        self._on_fatal = on_fatal
        self._started_ms = int(time.time() * 1000)
        self._models: dict[str, Served] = {}
        self._held: dict[str, Sequence] = {}
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._loose: set[asyncio.Task[None]] = set()
        self._strays: set[str] = set()
        self.strays = 0
        """Requests found that named this worker without its knowing: none, unless replies were lost."""
        self._stopping = False
        dial = lambda: connect(config.redis_url, timeout=config.redis_timeout, client_name=f"sluice-{worker_id}")  # noqa: E731
        self.redis = Commander(dial, name=worker_id)
        self.store = RequestStore(self.redis, config)
        self._outbox = Outbox(self.store, worker_id, self._odd, self._watch)
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
        self._spawn(self._beats(), "beats")

    async def serve(self, models: dict[str, Served]) -> None:
        """Announce the models and claim requests until :meth:`drain` is done."""
        self._models = models
        self.state = "ready"
        self._outbox.start()
        self._subscriber.start()
        await self._beat()
        self._spawn(self._claims(), "claims")
        self._spawn(self._checks(), "checks")

    async def drain(self, timeout: float) -> None:
        """Stop claiming; finish what is held within ``timeout`` seconds, hand the rest back."""
        self.state = "draining"
        try:
            async with asyncio.timeout(timeout):
                await self._beat()
                await self._empty.wait()
                await self._outbox.wait_flushed()
        except TimeoutError:
            await self._hand_back()
        except StoreUnavailable:
            logger.warning("draining without Redis", extra={"event": "drain_blind"})

    async def stop(self) -> None:
        """Leave: nothing is claimed or held any more."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._outbox.stop()
        await self._subscriber.stop()
        for served in self._models.values():
            await served.engine.close()
        k = self.store.keys
        try:
            async with asyncio.timeout(1.0):
                await self.redis.call("DEL", k.worker_beat(self.id))
                if not await self.redis.call("EXISTS", k.of_worker(self.id)):
                    await self.redis.call("SREM", k.workers, self.id)
        except (StoreUnavailable, TimeoutError):
            logger.info("leaving without a word: Redis does not answer")
        await self.redis.stop()

    async def _hand_back(self) -> None:
        """Put everything held back into the queue; another worker goes on from the log."""
        held, self._held = dict(self._held), {}
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

    def _spawn(self, coro: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coro, name=name)  # type: ignore[arg-type]
        task.add_done_callback(self._watch)
        self._tasks.append(task)

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._stopping:
            error = task.exception()
            assert error is not None
            logger.critical("the worker's task %s has failed", task.get_name(), exc_info=error)
            self._on_fatal(error)

    # -- heartbeat ---------------------------------------------------------------------------------

    async def _beats(self) -> None:
        steps, moved = -1, time.monotonic()
        sending: asyncio.Task[None] | None = None
        while True:
            stats = self._stats()
            if stats.steps != steps or not stats.running:
                steps, moved = stats.steps, time.monotonic()
            elif time.monotonic() - moved > self.config.stall_timeout:
                raise EngineDied(f"no engine step for {self.config.stall_timeout:.0f} s with {stats.running} running")
            # The supervisor hears that this loop turns, whether or not Redis answers meanwhile.
            self._on_beat()
            if sending is None or sending.done():
                sending = self._loosely(self._try_beat())
            await asyncio.sleep(self.config.heartbeat_interval)

    async def _try_beat(self) -> None:
        try:
            await self._beat()
        except StoreUnavailable:
            logger.debug("no heartbeat: Redis does not answer")
        except SluiceError:
            logger.exception("no heartbeat", extra={"event": "beat_failed"})

    async def _beat(self) -> None:
        k = self.store.keys
        await asyncio.gather(
            self.redis.call(
                "SET", k.worker_beat(self.id), encode(self.beat()), "PX", round(self.config.heartbeat_ttl * 1000)
            ),
            self.redis.call("SADD", k.workers, self.id),
        )

    def beat(self) -> WorkerBeat:
        infos = [m.info for m in self._models.values()]
        if not infos:
            infos = [ModelInfo(a, "", 0, 0, 0) for a in self._aliases]
        return WorkerBeat(
            id=self.id,
            pool=self._pool,
            host=host_name(),
            pid=os.getpid(),
            device=self._device,
            state=self.state,  # type: ignore[arg-type]
            models=infos,
            stats=self._stats(),
            started_ms=self._started_ms,
            version=VERSION,
            restarts=self._restarts,
            held=len(self._held),
            rss_bytes=resident_bytes(),
            device_bytes=device_bytes(),
        )

    def _stats(self) -> EngineStats:
        each = [m.engine.stats() for m in self._models.values()]
        if len(each) == 1:
            return each[0]
        total = {f: sum(getattr(s, f) for s in each) for f in EngineStats.__struct_fields__}
        return msgspec.convert(total, EngineStats)

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
                async with asyncio.timeout(self.config.check_interval):
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
                await self._unclaim(claim.id)
            if not claims or refused:
                return
            free = served.engine.free_slots()

    def _start(self, claim: Claim, served: Served) -> bool:
        """Hand a claimed request to the engine; false where it has no room just now."""
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

    async def _unclaim(self, request_id: str) -> None:
        try:
            await self.store.requeue(request_id, worker=self.id, lost=False)
        except StoreUnavailable:
            # It still names this worker: the periodic check tries again.
            logger.warning("request %s could not be handed back", request_id, extra={"request_id": request_id})

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

    def _odd(self, request_id: str, word: str, server: str) -> None:
        if word == "stale":
            self._abort(request_id)
        elif word == "gap":
            # Goes back to the queue, and on from what its log still has.
            self._abort(request_id)
            self._loosely(self._unclaim(request_id))
        elif word == "moved" and request_id in self._held:
            self._held[request_id].server = server
        elif word == "detached":
            self._loosely(self._settle_detached(request_id))

    async def _settle_detached(self, request_id: str) -> None:
        """Its last frame is logged and nobody reads it: end it here, keeping the log for its time."""
        try:
            finish = await self.redis.call("HGET", self.store.keys.request(request_id), "finish")
            if finish is None:
                return
            word = finish.decode()
            done = word in ("stop", "length")
            outcome = Outcome.finished(word) if done else Outcome.failed(Reason.ENGINE_ERROR)
            self._count(await self.store.settle(request_id, outcome, guard=("server", "")))
        except StoreUnavailable:
            logger.info("request %s is left to the reaper", request_id, extra={"request_id": request_id})

    def _count(self, ending: Ending | None) -> None:
        if ending is not None:
            log_ending(ending)
            metrics.ended(ending)

    def _loosely(self, coro: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coro)  # type: ignore[arg-type]
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)
        return task

    async def _checks(self) -> None:
        """Once per ``check_interval``: what is held and no longer ours, and what is ours and not held."""
        while True:
            await asyncio.sleep(self.config.check_interval)
            ids = list(self._held)
            try:
                lengths = await self.store.held(ids, "worker", self.id)
                await self._find_strays()
                for ending in await self.store.recover():
                    self._count(ending)
            except StoreUnavailable:
                continue
            for request_id, length in zip(ids, lengths, strict=True):
                if length < 0:
                    self._abort(request_id)

    async def _find_strays(self) -> None:
        """Requests that name this worker, twice in a row, although it does not hold them.

        The reply to their claim was lost, or a claim reached Redis long after its
        connection was given up. They go back to the queue.
        """
        members = {m.decode() for m in await self.redis.call("SMEMBERS", self.store.keys.of_worker(self.id))}
        found = members - self._held.keys() - self._outbox.ids() if self.state != "starting" else set()
        for request_id in found & self._strays:
            self.strays += 1
            logger.warning(
                "request %s was never received: back to the queue",
                request_id,
                extra={"event": "stray_claim", "request_id": request_id},
            )
            await self._unclaim(request_id)
        self._strays = found
