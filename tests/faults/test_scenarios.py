"""The classic endings, on every transport, through a real server and a real worker process.

What these tests guard: leaving the request's context settles it (skip the
``finally`` in ``Gateway.request`` and every test here fails), before the body
ends (settle after the last body message and ``settled_before_the_end`` fails),
with one abort for a client that has gone and none for one that has not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.harness import SLACK, Rig, Server
from tests.faults.transports import EVERY, STREAMING, TRANSPORTS, Call, undisturbed
from tests.support import eventually

MODELS = "scripted=scripted:rate=100,prefill=1,faults=1,context=100000,slots=4"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Rig, Server]]:
    """One server and one worker for all tests of this module; every test leaves it quiet."""
    async with Rig(Path(tmp_path_factory.mktemp("site")), SLUICE_MODELS=MODELS) as rig:
        _, server = await asyncio.gather(rig.pool(), rig.server())
        yield rig, server


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_all_pieces_then_clean(site: tuple[Rig, Server], kind: str) -> None:
    rig, server = site
    whole = await undisturbed(rig, server, 40, "hi there")
    call = await Call.begin(rig, server, kind, 40, prompt="hi there")
    reply = await call.finish()
    assert await rig.views.count() == 0, "the record must be gone before the exchange ends"
    assert (reply.done, reply.finish, reply.error) == (True, "length", None)
    if kind in ("sse-generate", "ws", "sse-completions"):
        assert reply.text == whole
    await rig.quiet()
    ending = await rig.ending(call.id)
    assert (ending.state, ending.reason, ending.generated_tokens) == ("finished", "length", 40)
    assert rig.aborts_of(call.id) == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_single_token_then_clean(site: tuple[Rig, Server], kind: str) -> None:
    """Role chunk, end chunk, [DONE] - the shortest stream there is."""
    rig, server = site
    call = await Call.begin(rig, server, kind, 1, find=False)
    reply = await call.finish()
    assert (reply.done, reply.finish) == (True, "length")
    if kind == "sse-chat":
        assert '"role":"assistant"' in reply.events[0] and reply.events[-1] == "[DONE]"
    assert await rig.views.count() == 0
    await rig.quiet()


MOMENTS = [(m, k) for m in ("queued", "prefill") for k in TRANSPORTS] + [("decode", k) for k in EVERY]


@pytest.mark.parametrize(("moment", "kind"), MOMENTS)
async def test_client_gone_is_one_abort(
    site: tuple[Rig, Server], kind: str, moment: str, timing: Callable[[str, float, float], None]
) -> None:
    rig, server = site
    blockers = []
    if moment == "queued":
        blockers = [await Call.begin(rig, server, "sse-generate", 90_000) for _ in range(4)]
        for blocker in blockers:
            await rig.running(blocker.id)
    # A second of prefill per 1,000 tokens of prompt.
    prompt = "x" * (8000 if moment == "prefill" else 2)
    call = await Call.begin(rig, server, kind, 50_000, prompt=prompt)
    if moment == "decode":
        await rig.running(call.id, 5)
    elif moment == "prefill":
        await eventually(lambda: _phase(rig, call.id, "prefill"), what="in prefill")
    else:
        assert await _phase(rig, call.id, "queued")
    if moment != "queued":
        await eventually(lambda: _holds(rig, 1), what="the worker says that it holds it")
    began = time.monotonic()
    await call.leave()
    await eventually(lambda: _gone(rig, call.id, held=len(blockers)), 10, what="record and slot are free")
    timing(
        f"client gone while {'in ' if moment != 'queued' else ''}{moment} ({kind})", time.monotonic() - began, 1 + SLACK
    )
    ending = await rig.ending(call.id)
    assert (ending.state, ending.reason) == ("cancelled", "client_gone")
    assert rig.aborts_of(call.id) == (0 if moment == "queued" else 1)
    for blocker in blockers:
        await blocker.leave()
    await rig.quiet()
    assert all(rig.aborts_of(b.id) == 1 for b in blockers)


async def _phase(rig: Rig, request_id: str, phase: str) -> bool:
    view = await rig.views.view(request_id)
    return view is not None and view.phase == phase


async def _holds(rig: Rig, count: int) -> bool:
    (worker,) = await rig.views.workers()
    return worker.held == count


async def _gone(rig: Rig, request_id: str, held: int) -> bool:
    (worker,) = await rig.views.workers()
    return await rig.views.view(request_id) is None and worker.held == held


@pytest.mark.parametrize("kind", STREAMING)
@pytest.mark.parametrize("stays", [False, True])
async def test_a_caller_that_stops_at_the_final_piece(site: tuple[Rig, Server], kind: str, stays: bool) -> None:
    """It has what it wanted and reads no further: neither the end chunk nor [DONE] is ever taken."""
    rig, server = site
    call = await Call.begin(rig, server, kind, 10)
    await call.pieces(1)
    await (call.stop_reading() if stays else call.leave())
    await rig.quiet()
    ending = await rig.ending(call.id)
    if stays:
        assert (ending.state, ending.generated_tokens) == ("finished", 10)
        await call.leave()
    else:
        assert ending.state in ("finished", "cancelled")


async def test_cancel_is_idempotent(site: tuple[Rig, Server]) -> None:
    rig, server = site
    call = await Call.begin(rig, server, "sse-chat", 50_000)
    call.reading()
    await rig.running(call.id, 3)
    answers = []
    for _ in range(3):
        exchange = await server.post(f"/v1/requests/{call.id}/cancel", {})
        answers.append(exchange.status)
        await exchange.close()
    assert answers[0] == 200 and set(answers) <= {200, 404}
    reply = await call.finish()
    assert reply.error is not None and not reply.done
    await rig.quiet()
    assert (await rig.ending(call.id)).reason == "user"
    assert rig.aborts_of(call.id) == 1
