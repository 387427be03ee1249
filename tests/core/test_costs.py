"""What one token and one request cost the store, counted: these numbers do not drift with the machine.

Each bound is what was counted when it was written, plus a little. A change that passes one of them has
made every token of every stream dearer; it wants a reason, and then a new number here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio as redis_async

from inference.gateway import Gateway
from inference.keys import Keys
from inference.messages import Step, decode_frame, decode_server_message
from tests.core.conftest import Deployment, read, spec
from tests.support import eventually

QUIET: dict[str, Any] = {
    # Nothing periodic happens during a test, so that every command belongs to a request.
    "heartbeat_interval": 300.0,
    "heartbeat_ttl": 900.0,
    "reap_interval": 300.0,
    "check_interval": 300.0,
    "ping_interval": 300.0,
    "models": "scripted=scripted:rate=0,slots=64",
}
BESIDE = {"ping", "info", "client", "hello", "select", "script|load", "subscribe", "unsubscribe", "config|resetstat"}
"""Commands of connections, not of requests."""


async def commands(redis: redis_async.Redis) -> Counter[str]:
    """How often each command has run, by clients and by scripts alike."""
    stats = await redis.info("commandstats")
    counts = {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}
    return Counter({name: calls for name, calls in counts.items() if name not in BESIDE})


@pytest.fixture
async def site(deploy: Callable[..., Deployment]) -> Deployment:
    return deploy(**QUIET)


async def serve(gateway: Gateway, streams: int, tokens: int) -> None:
    """Answers, read to their ends, all settled."""

    async def one() -> None:
        async with gateway.request(spec(tokens)) as stream:
            await read(stream)

    await asyncio.gather(*(one() for _ in range(streams)))


async def spent(redis: redis_async.Redis, gateway: Gateway, streams: int, tokens: int) -> Counter[str]:
    """The commands that some answers took, from their submission until all of it is gone."""
    before = await commands(redis)
    await serve(gateway, streams, tokens)
    await eventually(lambda: idle(gateway), what="nothing in flight")
    return await commands(redis) - before


async def idle(gateway: Gateway) -> bool:
    return not gateway.open_ids() and not gateway.settler.pending


async def test_commands_per_token(site: Deployment, redis: redis_async.Redis) -> None:
    """A frame costs one read of its record, one log entry, one count; a step one script and one message.

    Fails, for instance, where ``append.lua`` reads a field with a command of its own, or where the
    outbox sends frames one by one.
    """
    gateway, worker = await site.both()
    few = await spent(redis, gateway, 32, 10)
    steps = worker.beat().stats.steps
    many = await spent(redis, gateway, 32, 110)
    steps = worker.beat().stats.steps - steps
    extra = many - few
    frames = 32 * 100
    for name in ("hmget", "rpush", "hset"):
        assert extra[name] <= frames + 64, (name, extra)
    # Steps are merged where Redis is slower than the engine, never split.
    assert extra["evalsha"] <= steps + 64, (steps, extra)
    assert extra["publish"] <= steps + 64, (steps, extra)
    assert extra.total() <= 3 * frames + 3 * steps + 256, extra


async def test_commands_per_request(site: Deployment, redis: redis_async.Redis) -> None:
    """From submission to settled.

    Fails, for instance, where a gateway renews anything per request, or asks for the place in the
    queue of a request whose client does not want it.
    """
    gateway, _ = await site.both()
    await spent(redis, gateway, 1, 1)
    requests = 40
    counts = Counter[str]()
    for _ in range(requests):
        counts += await spent(redis, gateway, 1, 1)
    # A worker may look into an empty queue once more: how often is not quite the same each time.
    assert counts["zpopmin"] <= 4 * requests, counts
    assert counts["evalsha"] - counts["zpopmin"] <= 3 * requests, counts
    assert counts["publish"] <= 3 * requests, counts
    rest = counts.total() - sum(counts[name] for name in ("evalsha", "time", "zpopmin", "exists", "del"))
    assert rest <= 45 * requests, counts


async def test_an_idle_server_asks_for_everything_at_once(deploy: Callable[..., Deployment]) -> None:
    """Its heartbeat, its reaper and its check of streams wake together, and what they ask goes in the same round trips.

    Fails where one of them sleeps by a clock of its own: its questions then take round trips of their own.
    """
    deployment = deploy(heartbeat_interval=0.5, heartbeat_ttl=60.0, reap_interval=0.5, check_interval=0.5)
    gateway, _ = await deployment.both()
    await gateway.presence.wait_refreshed()
    trips, commands, ticks = gateway.redis.round_trips, gateway.redis.commands, 8
    for _ in range(ticks):
        await gateway.presence.wait_refreshed()
    assert gateway.redis.commands - commands >= 10 * ticks, "nothing was asked"
    assert gateway.redis.round_trips - trips <= 4 * ticks + 4


async def test_one_message_per_step_and_server(site: Deployment, redis: redis_async.Redis) -> None:
    """A step is one message to each server that reads from it, however many streams that server has.

    Fails where ``Outbox._payloads`` makes a message per frame.
    """
    worker = await site.worker()
    gateways = [await site.gateway() for _ in range(2)]
    for gateway in gateways:
        await eventually(lambda g=gateway: g.models(), what="the worker is seen")
    messages: list[Step] = []
    async with redis.pubsub() as pubsub:
        await pubsub.psubscribe(Keys().server_channel("*"))
        reader = asyncio.create_task(collect(pubsub, messages))
        first = worker.beat().stats.steps
        await asyncio.gather(*(serve(gateway, 16, 50) for gateway in gateways))
        steps = worker.beat().stats.steps - first
        await eventually(lambda: tokens(messages) >= 2 * 16 * 50, what="every token was told")
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    assert tokens(messages) == 2 * 16 * 50
    assert len(messages) <= 2 * steps, (len(messages), steps)


def tokens(messages: list[Step]) -> int:
    return sum(len(decode_frame(part.frame).ids) for m in messages for part in m.frames)


async def collect(pubsub: Any, into: list[Step]) -> None:
    async for message in pubsub.listen():
        if message["type"] == "pmessage":
            decoded = decode_server_message(message["data"])
            if isinstance(decoded, Step):
                into.append(decoded)
