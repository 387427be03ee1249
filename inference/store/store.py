"""The request store: every change to the state of a request, as typed operations."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from inference.config import Config
from inference.errors import Overloaded, StoreUnavailable
from inference.keys import PRIORITIES, Keys
from inference.lifecycle import Outcome, Reason, State
from inference.messages import Ending, Job, decode_ending, decode_job, encode
from inference.redisio import Commander, Script
from inference.store.records import Attached, Claim, Submission, claims_from, described

_LUA = Path(__file__).parent / "lua"
SUBMIT, CLAIM, APPEND, SETTLE, REQUEUE, DETACH, ATTACH, HELD, RESTARTS = (
    Script(_LUA / f"{name}.lua")
    for name in ("submit", "claim", "append", "settle", "requeue", "detach", "attach", "held", "restarts")
)


_TOLD = 4096
"""Endings that this process remembers to have been given, so as not to give one twice."""
_DOUBT = 60.0
"""Seconds for which a settle whose reply was lost is looked for in the history."""


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class Append:
    """One frame on its way into the log.

    ``server`` is where the worker believes it is read; ``shown`` is false as long as all the tokens
    of an answer are held back, so that its reader has seen none yet.
    """

    __slots__ = ("attempt", "finish", "frame", "id", "seq", "server", "shown", "tokens")

    def __init__(
        self,
        id: str,
        attempt: int,
        seq: int,
        frame: bytes,
        tokens: int,
        finish: str,
        server: str,
        shown: bool = True,
    ) -> None:
        self.id = id
        self.attempt = attempt
        self.seq = seq
        self.frame = frame
        self.tokens = tokens
        self.finish = finish
        self.server = server
        self.shown = shown


class RequestStore:
    """Operations of servers, workers, supervisors and reapers.

    Every method raises :class:`~inference.errors.StoreUnavailable` where Redis
    does not answer; all of them may then be repeated.
    """

    def __init__(self, commander: Commander, config: Config, *, counts: bool = True) -> None:
        self.redis = commander
        self.config = config
        self.keys = Keys(config.redis_prefix)
        self.token = secrets.token_hex(5) if counts else ""
        """Marks the endings that this process settled, and counts in its metrics."""
        self._doubted: dict[str, float] = {}
        self._told: dict[str, None] = {}

    # -- servers -------------------------------------------------------------------------------

    def submit(self, submission: Submission, *, server: str, slots: int) -> asyncio.Future[tuple[int, int]]:
        """Queue a request. The future gives its acceptance time (ms) and queue position.

        ``slots`` is what the workers of the model run at once; the queue takes
        ``max_queued`` beyond that. The command is on its way when this returns.

        Raises (from the future):
            Overloaded: the queue is full; nothing was stored.
        """
        job, k = submission.job, self.keys
        fields = {
            "model": job.model,
            "endpoint": submission.endpoint,
            "transport": submission.transport,
            "owner": submission.owner,
            "client": submission.client,
            "resumable": int(submission.resumable),
            "prompt_tokens": len(job.prompt_ids),
            "max_tokens": job.params.max_tokens,
            "params": msgspec.json.encode(described(job.params)),
            "job": encode(job),
        }
        reply = self.redis.script(
            SUBMIT,
            [k.request(job.id), k.queue(job.model), k.running(job.model), k.fair(job.model), k.live, k.deadlines,
             k.of_server(server)],
            [job.id, slots + self.config.max_queued, PRIORITIES[submission.priority], submission.owner,
             _ms(submission.timeout), server, k.wake_channel(job.model),
             _ms(self.config.queue_timeout), *(x for kv in fields.items() for x in kv)],
        )  # fmt: skip
        result: asyncio.Future[tuple[int, int]] = reply.get_loop().create_future()
        reply.add_done_callback(lambda done: _submitted(done, result))
        return result

    async def settle(
        self,
        request_id: str,
        outcome: Outcome,
        *,
        server: str = "",
        guard: tuple[str, str] | None = None,
    ) -> Ending | None:
        """End a request. Exactly one caller gets the summary; all others get ``None``.

        ``guard`` names a field of the record that must have a value, so that a
        reaper never ends what a living process has taken over meanwhile.
        """
        k = self.keys
        field, value = guard or ("", "")
        call = self.redis.script(
            SETTLE,
            [k.request(request_id), k.log(request_id), k.end(request_id), k.live, k.deadlines, k.detached, k.history,
             k.outcomes, k.usage],
            [request_id, outcome.state, outcome.reason, k.prefix, _ms(self.config.log_retention),
             self.config.history_size, server, field, value, self.token],
        )  # fmt: skip
        try:
            reply = await call
        except StoreUnavailable:
            self.doubt(request_id)
            raise
        if reply is None:
            return None
        return decode_ending(reply) if self._tell(request_id) else None

    def _tell(self, request_id: str) -> bool:
        """Whether this process has yet to tell of this ending: a lost reply and a reader that leaves both ask."""
        self._doubted.pop(request_id, None)
        if request_id in self._told:
            return False
        self._told[request_id] = None
        if len(self._told) > _TOLD:
            del self._told[next(iter(self._told))]
        return True

    def doubt(self, request_id: str) -> None:
        """It may have been settled by this process without its knowing: :meth:`recover` will tell."""
        if request_id not in self._told:
            self._doubted.setdefault(request_id, time.monotonic() + _DOUBT)

    async def recover(self) -> list[Ending]:
        """Endings that nobody has counted and this process should: its own whose reply was lost, and
        those of its requests that a process without metrics settled. Each is given once.
        """
        if not self._doubted:
            return []
        history = await self.redis.call("LRANGE", self.keys.history, 0, self.config.history_size - 1)
        # A repeat that got its reply meanwhile has taken its id out.
        known = [e for e in map(decode_ending, history) if self._doubted.pop(e.id, 0.0)]
        now = time.monotonic()
        self._doubted = {i: until for i, until in self._doubted.items() if until > now}
        return [e for e in known if e.by in (self.token, "") and self._tell(e.id)]

    async def detach(self, request_id: str, *, server: str, grace: float, reader: str | None = None) -> tuple[str, str]:
        """Let go of a resumable request. Gives (``detached`` | ``finished`` | ``fixed`` | ``gone``, finish).

        ``reader``: only where it is the last to have taken it over (empty: nobody has).
        """
        k = self.keys
        reply = await self.redis.script(
            DETACH,
            [k.request(request_id), k.detached],
            [request_id, server, k.prefix, _ms(grace), "*" if reader is None else reader],
        )
        return reply[0].decode(), reply[1].decode()

    async def attach(self, request_id: str, *, server: str, reader: str, owner: str = "") -> Attached | str:
        """Take over a stream, or say why not: ``gone``, ``fixed`` (not resumable), ``foreign``."""
        k = self.keys
        reply = await self.redis.script(
            ATTACH,
            [k.request(request_id), k.detached, k.of_server(server)],
            [request_id, server, reader, k.prefix, owner],
        )
        word = reply[0].decode()
        if word != "ok":
            return str(word)
        state, model, endpoint, of, attempt, prompt = (x.decode() for x in reply[1:7])
        job, turn, created_ms = decode_job(reply[7]), int(reply[8]), int(reply[9])
        return Attached(request_id, state, model, endpoint, of, int(attempt), int(prompt), job, turn, created_ms)

    async def read_log(self, request_id: str, after: int, limit: int) -> list[bytes]:
        """Encoded frames with sequence numbers above ``after``, at most ``limit``."""
        reply = await self.redis.call("LRANGE", self.keys.log(request_id), after, after + limit - 1)
        return list(reply)

    async def ending(self, request_id: str) -> Ending | None:
        """The summary of a resumable request that ended within the retention time."""
        reply = await self.redis.call("GET", self.keys.end(request_id))
        return None if reply is None else decode_ending(reply)

    async def outcome(self, request_id: str) -> Outcome | None:
        """How a request ended lately, going by the history; ``None`` where nothing is known of it."""
        for raw in await self.redis.call("LRANGE", self.keys.history, 0, self.config.history_size - 1):
            ending = decode_ending(raw)
            if ending.id == request_id:
                return Outcome(State(ending.state), Reason(ending.reason))
        return None

    async def held(self, ids: Sequence[str], field: str, value: str) -> list[int]:
        """For each id the length of its log, -1 where its record's ``field`` is not ``value``."""
        if not ids:
            return []
        names = [key for i in ids for key in (self.keys.request(i), self.keys.log(i))]
        return list(await self.redis.script(HELD, names, [field, value]))

    # -- workers -------------------------------------------------------------------------------

    async def claim(self, model: str, worker: str, count: int) -> list[Claim]:
        """Take up to ``count`` queued requests of a model."""
        k = self.keys
        reply = await self.redis.script(
            CLAIM, [k.queue(model), k.running(model), k.fair(model), k.of_worker(worker)], [worker, count, k.prefix]
        )
        return [Claim(i.decode(), attempt, decode_job(job), srv.decode(), log) for i, attempt, job, srv, log in reply]

    async def append(
        self, worker: str, frames: Sequence[Append], payloads: Sequence[tuple[str, bytes]]
    ) -> list[tuple[int, str, str]]:
        """Log one step and publish it, in one round trip. Gives the exceptions (see ``append.lua``)."""
        names = [key for f in frames for key in (self.keys.request(f.id), self.keys.log(f.id))]
        args: list[Any] = [worker, self.keys.prefix, len(frames)]
        for f in frames:
            args += (f.id, f.attempt, f.seq, f.frame, f.tokens, f.finish, f.server, int(f.shown))
        for server, payload in payloads:
            args += (server, payload)
        odd = await self.redis.script(APPEND, names, args)
        return [(odd[i], odd[i + 1].decode(), odd[i + 2].decode()) for i in range(0, len(odd), 3)]

    async def publish_to_server(self, server: str, payload: bytes) -> None:
        await self.redis.call("PUBLISH", self.keys.server_channel(server), payload)

    async def requeue(self, request_id: str, *, worker: str, lost: bool, certain: bool = True) -> str:
        """Take a request from a worker: ``requeued``, ``exhausted``, ``finished`` or ``gone``.

        ``lost`` counts against the request; a loss that is not ``certain`` (a heartbeat
        that did not come in time, as from a machine under load) counts a third.
        """
        k = self.keys
        reply = await self.redis.script(
            REQUEUE,
            [k.request(request_id)],
            [request_id, worker, k.prefix, 3 * self.config.max_attempts, (3 if certain else 1) if lost else 0],
        )
        return str(reply.decode())

    # -- pools ---------------------------------------------------------------------------------

    async def count_restarts(self, pool: str, count: int, told: int) -> int:
        """Say how many workers a pool has replaced, ``told`` of them before. Gives the total of all pools, ever."""
        return int(await self.redis.script(RESTARTS, [self.keys.restarts, self.keys.pools], [pool, count, told]))

    # -- operators -----------------------------------------------------------------------------

    async def tell_worker(self, worker: str, payload: bytes) -> int:
        """Send an encoded WorkerMessage; gives how many processes heard it."""
        return int(await self.redis.call("PUBLISH", self.keys.worker_channel(worker), payload))

    async def tell_server(self, server: str, payload: bytes) -> int:
        """Send an encoded ServerMessage; gives how many processes heard it."""
        return int(await self.redis.call("PUBLISH", self.keys.server_channel(server), payload))

    async def details(self, request_id: str) -> tuple[Job, list[tuple[int, str]]] | None:
        """The job of a live request and its claims (see :func:`claims_from`); ``None`` where it is not alive."""
        job, claims = await self.redis.call("HMGET", self.keys.request(request_id), "job", "claims")
        if job is None:
            return None
        return decode_job(job), claims_from((claims or b"").decode())

    async def now_ms(self) -> int:
        seconds, micros = await self.redis.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000


def _submitted(reply: asyncio.Future[Any], result: asyncio.Future[tuple[int, int]]) -> None:
    if result.done():
        return
    if reply.cancelled():
        result.cancel()
    elif (error := reply.exception()) is not None:
        result.set_exception(error)
        result.exception()
    else:
        word, first, second = reply.result()
        if word == b"ok":
            result.set_result((first, second))
        else:
            result.set_exception(Overloaded(f"the queue is full ({first} waiting, {second} running)"))
            result.exception()
