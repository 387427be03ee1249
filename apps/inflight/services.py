"""What an operator may do to running work. Checks permission, acts, writes Django's admin log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from asgiref.sync import sync_to_async
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied, SuspiciousOperation

from apps.inflight.models import InflightRequest
from apps.inflight.roster import Source, roster
from inference.lifecycle import Reason
from inference.messages import ServerBeat, WorkerBeat, decode_frame, decode_job
from sluice import runtime

logger = logging.getLogger(__name__)

AT_ONCE = 32
MAX_REASON = 200


class Cancelled(NamedTuple):
    """Ids that this call cancelled, and those that had ended before it."""

    done: list[str]
    gone: list[str]


async def cancel_requests(actor: Any, gateway: Source, ids: Sequence[str], reason: str) -> Cancelled:
    """Cancel each request; safe to repeat, and for two operators at once.

    A request that a client, a deadline or another operator ended first counts
    as ``gone``. Whatever was cancelled before an error is logged all the same.

    Raises:
        PermissionDenied: ``actor`` lacks ``inflight.cancel_request``.
        StoreUnavailable: Redis did not answer for some of them; repeat the call.
    """
    await _require(actor, "inflight.cancel_request")
    limit = asyncio.Semaphore(AT_ONCE)
    done: list[str] = []
    gone: list[str] = []

    async def cancel(request_id: str) -> None:
        async with limit:
            outcome = await gateway.cancel(request_id, Reason.ADMIN)
        ours = outcome is not None and outcome.reason is Reason.ADMIN
        (done if ours else gone).append(request_id)

    unique = list(dict.fromkeys(ids))
    results = await asyncio.gather(*(cancel(i) for i in unique), return_exceptions=True)
    roster.expire()
    if done:
        text = f"Cancelled. Reason: {reason.strip()[:MAX_REASON] or 'none given'}"
        await sync_to_async(_log)(actor, done, text)
        logger.info("%d request(s) cancelled by an operator", len(done), extra={"event": "admin_cancel", "ids": done})
    for result in results:
        if isinstance(result, BaseException):
            raise result
    order = {i: n for n, i in enumerate(unique)}
    return Cancelled(sorted(done, key=order.__getitem__), sorted(gone, key=order.__getitem__))


async def _require(actor: Any, permission: str) -> None:
    if not await sync_to_async(actor.has_perm)(permission):
        raise PermissionDenied(f"This needs the permission {permission}.")


def _log(actor: Any, ids: Sequence[str], text: str) -> None:
    objects = [InflightRequest(id=i) for i in ids]
    LogEntry.objects.log_actions(actor.pk, objects, CHANGE, change_message=text)  # type: ignore[arg-type]


WORKER_VERBS = {
    "quiet": "It finishes what it runs and takes nothing new until it is resumed.",
    "resume": "It takes new requests again.",
    "drain": "It finishes what it runs, then exits. Its place stays empty until its pool is started anew.",
    "restart": "It exits now; its requests go on, without loss, on another worker, and its pool starts a new one.",
}
SERVER_VERBS = {
    "drain": "It takes nothing new and finishes what is open, however long that takes. It does not exit.",
    "undrain": "It accepts again.",
}


def worker_orders(beat: WorkerBeat) -> list[str]:
    """The orders that do something in the worker's present state; the others it takes, too."""
    if beat.state == "draining":
        return ["restart"]  # at once: it waits no longer for what it runs
    first = {"ready": ["quiet"], "quiet": ["resume"]}
    return [*first.get(beat.state, []), "drain", "restart"]


def server_orders(beat: ServerBeat) -> list[str]:
    """As :func:`worker_orders`; one that a signal has told to leave has a deadline, and heeds no order."""
    if beat.state == "serving":
        return ["drain"]
    return ["undrain"] if beat.drain_left_seconds is None and beat.state != "ending" else []


def explain(kind: str, verb: str) -> str:
    return (WORKER_VERBS if kind == "worker" else SERVER_VERBS)[verb]


def check_command(kind: str, verb: str) -> None:
    """Raises SuspiciousOperation (a 400) for an order that no form of ours sends."""
    known = {"worker": WORKER_VERBS, "server": SERVER_VERBS}.get(kind, {})
    if verb not in known:
        raise SuspiciousOperation("No such order.")


async def command(actor: Any, gateway: Any, kind: str, target: str, verb: str) -> bool:
    """Give an order to one worker or server; ``False`` where nobody of that id is there.

    Raises:
        PermissionDenied: ``actor`` lacks ``inflight.drain_server``.
    """
    check_command(kind, verb)
    await _require(actor, "inflight.drain_server")
    alive = await (gateway.workers() if kind == "worker" else gateway.servers())
    if target not in {beat.id for beat in alive}:
        return False
    send = gateway.command_worker if kind == "worker" else gateway.command_server
    heard = bool(await send(target, verb))
    if heard:
        await sync_to_async(_log)(actor, [f"{kind} {target}"], f"Told to {verb}.")
        logger.info("an operator told %s %s to %s", kind, target, verb, extra={"event": "admin_command"})
    return heard


MAX_TEXT = 20_000
LOG_CHUNK = 1000


class Text(NamedTuple):
    """What is being asked and answered, each cut to its last :data:`MAX_TEXT` characters, and how it is sampled."""

    prompt: str
    answer: str
    parameters: dict[str, Any]


async def read_text(actor: Any, gateway: Any, request_id: str) -> Text | None:
    """Prompt and answer of a request in flight; ``None`` where it is not alive. Every look is logged first.

    Raises:
        PermissionDenied: ``actor`` lacks ``inflight.view_text``.
    """
    await _require(actor, "inflight.view_text")
    store = gateway.store
    raw = await store.redis.call("HGET", store.keys.request(request_id), "job")
    if raw is None:
        return None
    await sync_to_async(_log)(actor, [request_id], "Read its prompt and answer.")
    logger.info("an operator read the text of %s", request_id, extra={"event": "admin_read_text"})
    job = decode_job(raw)
    answer: list[str] = []
    after = 0
    while frames := await store.read_log(request_id, after, LOG_CHUNK):
        answer += [decode_frame(f).text for f in frames]
        after += len(frames)
    if job.prompt_text is not None:
        prompt = job.prompt_text
    else:
        tokenizer = await runtime.tokenizer(job.model)
        prompt = await runtime.offload(tokenizer.decode, job.prompt_ids, False)
    parameters = {k: v for k, v in msgspec.to_builtins(job.params).items() if v not in (None, [], {})}
    return Text(prompt[-MAX_TEXT:], "".join(answer)[-MAX_TEXT:], parameters)
