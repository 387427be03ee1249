"""The life of a request through gateway, Redis and worker; every test ends with the audit."""

from __future__ import annotations

import asyncio

import pytest

from inference.errors import NotServing, Overloaded, SluiceError, TooLarge, UnknownModel
from inference.gateway import Detached, Gateway, RequestEnded, StreamGroup
from inference.lifecycle import Outcome, Reason
from inference.messages import Superseded, encode
from inference.store import RequestStore, audit
from tests.core.conftest import Deploy, job, read, spec
from tests.support import eventually


async def test_a_stream_ends_and_leaves_nothing(deploy: Deploy) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    async with gateway.request(spec(12)) as stream:
        frames = await read(stream)
    assert [f.seq for f in frames] == list(range(1, len(frames) + 1))
    assert sum(len(f.ids) for f in frames) == 12
    assert frames[-1].finish == "length"
    assert await gateway.views.count() == 0, "settled before the block is left"
    await deployment.clean(gateway)
    (ending,) = deployment.endings
    assert (ending.state, ending.reason, ending.generated_tokens) == ("finished", "length", 12)
    assert 0 < ending.created_ms <= ending.claimed_ms <= ending.first_token_ms <= ending.ended_ms


async def test_st_03_the_first_token_is_the_first_that_shows(deploy: Deploy) -> None:
    """The stop text may be meant until its last letter is another one; the tokens before it are held back."""
    deployment = deploy(models="scripted=scripted:say=1,rate=50")
    gateway, _ = await deployment.both()
    async with gateway.request(spec(12, prompt="[[say:aaaaaaaaaaab]]", stop=["a" * 12])) as stream:
        seen: list[tuple[bool, bool]] = []
        while not stream.finish:
            frames = await stream.next()
            seen.append((any(f.text for f in frames), stream.first_token > 0))
    assert seen[-1] == (True, True)
    assert all(shows == counted for shows, counted in seen)
    await deployment.clean(gateway)
    (ending,) = deployment.endings
    assert ending.first_token_ms == ending.last_token_ms > 0


async def test_an_answer_without_text_has_its_first_token_when_it_ends(deploy: Deploy) -> None:
    deployment = deploy(models="scripted=scripted:say=1,rate=50")
    gateway, _ = await deployment.both()
    async with gateway.request(spec(12, prompt="[[say:stop it]]", stop=["stop"])) as stream:
        frames = await read(stream)
    assert "".join(f.text for f in frames) == ""
    assert stream.first_token > 0
    await deployment.clean(gateway)
    (ending,) = deployment.endings
    assert ending.first_token_ms == ending.last_token_ms > 0


async def test_a_reader_that_leaves_early_cancels(deploy: Deploy) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    async with gateway.request(spec(4000)) as stream:
        await stream.next()
    await eventually(lambda: deployment.endings)
    assert deployment.endings[0].reason == "client_gone"
    await deployment.clean(gateway)


async def test_a_cancelled_task_settles_and_aborts_once(deploy: Deploy) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    started = asyncio.Event()

    async def serve() -> None:
        async with gateway.request(spec(4000)) as stream:
            while True:
                await stream.next()
                started.set()

    task = asyncio.create_task(serve())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await deployment.clean(gateway)
    assert [e.reason for e in deployment.endings] == ["client_gone"]


async def test_cancelled_while_the_submit_is_under_way(deploy: Deploy) -> None:
    """Without the settler's ``after`` the record would be stored after it was settled."""
    deployment = deploy()
    gateway, _ = await deployment.both()

    async def serve() -> None:
        async with gateway.request(spec(4000)) as stream:
            await stream.next()

    for turns in range(6):
        task = asyncio.create_task(serve())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await gateway.settler.wait_empty()
    await deployment.clean(gateway)


async def test_refusals_store_nothing(deploy: Deploy) -> None:
    deployment = deploy(models="scripted=scripted:rate=5,slots=1,context=100", max_queued=1)
    gateway, _ = await deployment.both()
    async with gateway.request(spec(50)) as first:
        await first.next()
        async with gateway.request(spec(50)):
            with pytest.raises(Overloaded):
                async with gateway.request(spec(50)):
                    pass
    with pytest.raises(TooLarge):
        async with gateway.request(spec(1000)):
            pass
    with pytest.raises(UnknownModel):
        async with gateway.request(spec(5).__class__(job(5, model="nope"), "chat", "sse", "o")):
            pass
    await deployment.clean(gateway)


async def test_no_worker_is_said_at_once(deploy: Deploy) -> None:
    deployment = deploy()
    gateway = await deployment.gateway()
    with pytest.raises(NotServing):
        async with gateway.request(spec(5)):
            pass


async def test_admin_cancel_reaches_the_reader(deploy: Deploy) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    with pytest.raises(RequestEnded) as caught:
        async with gateway.request(spec(4000)) as stream:
            await stream.next()
            assert await gateway.cancel(stream.id, Reason.ADMIN) == Outcome.cancelled(Reason.ADMIN)
            assert await gateway.cancel(stream.id, Reason.ADMIN) is None
            while True:
                await stream.next()
    assert caught.value.outcome.reason is Reason.ADMIN
    await deployment.clean(gateway)
    assert len(deployment.endings) == 1


async def test_deadline(deploy: Deploy) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    with pytest.raises(RequestEnded) as caught:
        async with gateway.request(spec(4000, timeout=0.3)) as stream:
            while True:
                await stream.next()
    assert caught.value.outcome.reason is Reason.DEADLINE
    await deployment.clean(gateway)


async def test_an_audit_finds_nothing_while_requests_come_and_go(deploy: Deploy) -> None:
    """What it reads one after the other moves on meanwhile: that is no disagreement."""
    deployment = deploy(
        models="scripted=scripted:rate=400,slots=4", resume_grace=0.1, log_retention=0.0, heartbeat_ttl=30.0
    )
    gateway, worker = await deployment.both()
    enough = asyncio.Event()

    async def caller(number: int) -> None:
        while not enough.is_set():
            async with gateway.request(spec(1 + number % 40, resumable=number % 5 == 0)) as stream:
                if number % 3 == 0:
                    await gateway.store.requeue(stream.id, worker=worker.id, lost=False)
                await (stream.next() if number % 4 == 0 else read(stream))
            number += 8

    async with asyncio.TaskGroup() as callers:
        for number in range(8):
            callers.create_task(caller(number))
        try:
            for _ in range(15):
                assert (await audit(gateway.store)).findings == []
        finally:
            enough.set()

    async def empty() -> bool:
        report = await audit(gateway.store)
        assert report.findings == []
        return not report.records

    await eventually(empty, what="all have ended")


async def test_a_group_reads_several_streams(deploy: Deploy) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    counts = [0, 0]
    async with gateway.request(spec(3)) as a, gateway.request(spec(9)) as b:
        group = StreamGroup([a, b])
        while not group.done:
            for index, frames in await group.next():
                counts[index] += sum(len(f.ids) for f in frames)
    assert counts == [3, 9]
    await deployment.clean(gateway)


async def test_a_slow_reader_reads_on_from_the_log(deploy: Deploy) -> None:
    deployment = deploy(models="scripted=scripted:rate=0", stream_buffer=4)
    gateway, _ = await deployment.both()
    async with gateway.request(spec(300)) as stream:
        await eventually(lambda: gateway.views.view(stream.id), what="stored")

        async def all_logged() -> bool:
            return await gateway.redis.call("LLEN", gateway.store.keys.log(stream.id)) > 20

        await eventually(all_logged)
        frames = await read(stream)
    assert sum(len(f.ids) for f in frames) == 300
    assert [f.seq for f in frames] == list(range(1, len(frames) + 1))
    await deployment.clean(gateway)


async def test_resume_on_another_server(deploy: Deploy) -> None:
    deployment = deploy(models="scripted=scripted:rate=100")
    gateway, _ = await deployment.both()
    other = await deployment.gateway()
    plain = spec(60)
    async with gateway.request(plain) as stream:
        whole = [i for f in await read(stream) for i in f.ids]

    again = spec(60, resumable=True)
    seen: list[int] = []
    last = 0

    async def first_reader() -> None:
        nonlocal last
        async with gateway.request(again) as stream:
            while True:
                for frame in await stream.next():
                    seen.extend(frame.ids)
                    last = frame.seq

    task = asyncio.create_task(first_reader())
    await eventually(lambda: last >= 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with other.attach(again.job.id, after_seq=last, owner="key:test") as stream:
        seen += [i for f in await read(stream) for i in f.ids]
    assert seen == whole
    await deployment.clean(gateway)


async def test_the_older_reader_is_told(deploy: Deploy) -> None:
    deployment = deploy(models="scripted=scripted:rate=100")
    gateway, _ = await deployment.both()
    wanted = spec(100, resumable=True)
    told = asyncio.Event()

    async def older() -> None:
        with pytest.raises(Detached) as caught:
            async with gateway.request(wanted) as stream:
                while True:
                    await stream.next()
        assert caught.value.superseded
        told.set()

    task = asyncio.create_task(older())
    await eventually(lambda: gateway.views.view(wanted.job.id))
    async with gateway.attach(wanted.job.id, owner="key:test") as stream:
        await asyncio.wait_for(told.wait(), 5)
        frames = await read(stream)
    assert sum(len(f.ids) for f in frames) == 100
    await task
    await deployment.clean(gateway)


async def test_what_waits_for_a_model_that_nobody_serves_any_more_ends_soon(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it waited for its deadline although its last worker had left and no pool was left to bring one."""
    monkeypatch.setattr("inference.gateway.gateway._UNSERVED_LIMIT", 0.3)
    deployment = deploy()
    gateway, worker = await deployment.both()
    worker.state = "quiet"
    with pytest.raises(RequestEnded) as caught:
        async with gateway.request(spec(5)) as waiting:
            await worker.stop()
            while True:
                await waiting.next()
    assert caught.value.outcome == Outcome.failed(Reason.WORKER_LOST)
    await gateway.settler.wait_empty()
    assert await gateway.views.count() == 0


async def follow(gateway: Gateway, request_id: str) -> int:
    """Attach and read to the end: the number of tokens; -1 where another reader took over."""
    try:
        async with gateway.attach(request_id, owner="key:test") as stream:
            return sum(len(f.ids) for f in await read(stream))
    except Detached as exc:
        assert exc.superseded
        return -1


async def begun(gateway: Gateway, tokens: int) -> str:
    """A resumable request whose first reader has left."""
    wanted = spec(tokens, resumable=True)
    with pytest.raises(asyncio.CancelledError):
        async with gateway.request(wanted) as stream:
            await stream.next()
            raise asyncio.CancelledError
    await gateway.settler.wait_empty()
    return wanted.job.id


async def test_of_readers_that_come_at_once_one_is_left(deploy: Deploy) -> None:
    """Before, what told one of them to go reached the one after it, too: often none was left."""
    deployment = deploy(models="scripted=scripted:rate=200")
    gateway, _ = await deployment.both()
    other = await deployment.gateway()
    for _ in range(5):
        request_id = await begun(gateway, 100)
        read_to_the_end = await asyncio.gather(*(follow((gateway, other)[i % 2], request_id) for i in range(12)))
        assert sorted(read_to_the_end) == [-1] * 11 + [100]
    await deployment.clean(gateway)


async def test_old_news_of_a_reader_does_not_end_the_one_after_it(deploy: Deploy) -> None:
    deployment = deploy(models="scripted=scripted:rate=200")
    gateway, _ = await deployment.both()
    request_id = await begun(gateway, 60)
    async with gateway.attach(request_id, owner="key:test"), gateway.attach(request_id, owner="key:test") as stream:
        await gateway.store.publish_to_server(gateway.id, encode(Superseded(request_id, "another", 1)))
        assert sum(len(f.ids) for f in await read(stream)) == 60
    await deployment.clean(gateway)


async def test_a_reader_that_leaves_late_does_not_take_the_request_from_the_next(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a client that came back while its first connection was being dealt with lost the second one."""
    deployment = deploy(models="scripted=scripted:rate=100")
    gateway, _ = await deployment.both()
    detach, attached = gateway.store.detach, asyncio.Event()

    async def late(*args: str, **options: float) -> tuple[str, str]:
        await attached.wait()
        return await detach(*args, **options)  # type: ignore[arg-type]

    wanted = spec(150, resumable=True)
    with pytest.raises(asyncio.CancelledError):
        async with gateway.request(wanted) as stream:
            await stream.next()
            monkeypatch.setattr(gateway.store, "detach", late)
            raise asyncio.CancelledError
    async with gateway.attach(wanted.job.id, owner="key:test") as stream:
        attached.set()
        await gateway.settler.wait_empty()
        assert sum(len(f.ids) for f in await read(stream)) == 150
    await deployment.clean(gateway)


@pytest.mark.parametrize("owner", ["key:test", "key:foreign"])
@pytest.mark.parametrize("resumable", [False, True])
async def test_an_attach_that_is_given_up_leaves_the_request_alone(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, resumable: bool, owner: str
) -> None:
    """Before, asking for a request of somebody else, and leaving before the refusal came, ended it."""
    deployment = deploy(models="scripted=scripted:rate=100")
    gateway, _ = await deployment.both()
    attach, answered, release = gateway.store.attach, asyncio.Event(), asyncio.Event()

    async def slow(*args: str, **options: str) -> object:
        reply = await attach(*args, **options)  # type: ignore[arg-type]
        answered.set()
        await release.wait()
        return reply

    monkeypatch.setattr(gateway.store, "attach", slow)
    wanted = spec(100, resumable=resumable)
    async with gateway.request(wanted) as stream:
        await stream.next()
        asking = asyncio.create_task(follow_as(gateway, wanted.job.id, owner))
        await answered.wait()
        asking.cancel()
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(asking, return_exceptions=True)
        await gateway.settler.wait_empty()
        taken_over = resumable and owner == "key:test"
        if taken_over:
            with pytest.raises(Detached):
                await read(stream)
        else:
            await read(stream)
            assert stream.finish == "length"
    if not taken_over:
        assert [e.reason for e in deployment.endings] == ["length"]
        await deployment.clean(gateway)


async def follow_as(gateway: Gateway, request_id: str, owner: str) -> None:
    async with gateway.attach(request_id, owner=owner) as stream:
        await read(stream)


async def test_an_ending_counts_as_what_it_was_whatever_a_handler_makes_of_it(deploy: Deploy) -> None:
    """Handlers turn ``RequestEnded`` into errors of their own. Before, that made it an error of the engine, and
    what ``manage.py inflight --cancel`` had ended was counted nowhere."""
    deployment = deploy()
    gateway, _ = await deployment.both()
    command = RequestStore(gateway.redis, deployment.config, counts=False)
    with pytest.raises(ValueError):
        async with gateway.request(spec(4000)) as stream:
            await stream.next()
            assert await command.settle(stream.id, Outcome.cancelled(Reason.ADMIN)) is not None
            try:
                await read(stream)
            except RequestEnded as exc:
                raise ValueError from exc
    await eventually(lambda: deployment.endings)
    with pytest.raises(ValueError):
        async with gateway.request(spec(4000)) as stream:
            stream.end(RequestEnded(Outcome.failed(Reason.STATE_LOST), "Redis does not answer."))
            try:
                await read(stream)
            except RequestEnded as exc:
                raise ValueError from exc
    assert [e.reason for e in deployment.endings] == ["admin", "state_lost"]
    await deployment.clean(gateway)


async def test_what_was_accepted_beside_a_refused_one_is_no_failure(deploy: Deploy) -> None:
    """A call that needs several requests gives up those it got where one is refused: nothing has failed."""
    deployment = deploy(max_queued=1, models="scripted=scripted:rate=100,slots=1")
    gateway, _ = await deployment.both()
    with pytest.raises(SluiceError):
        async with gateway.request(spec(4000)), gateway.request(spec(4000)), gateway.request(spec(4000)):
            pass
    await eventually(lambda: len(deployment.endings) == 2)
    assert {e.reason for e in deployment.endings} == {"client_gone"}
    await deployment.clean(gateway)
