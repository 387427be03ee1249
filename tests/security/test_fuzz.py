"""Input of every kind that nobody meant: parsers on their own, then a live server over HTTP and WebSocket.

``SLUICE_FUZZ_SECONDS`` (default 10) is how long each live part goes on, ``SLUICE_FUZZ_EXAMPLES``
(default 300) how much each parser is given. The counts are printed (``-s``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import redis.asyncio as redis_async
import websockets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect

from apps.accounts import keyformat, origin
from apps.api.errors import ApiError
from apps.api.schema.base import Decoder
from apps.api.schema.embeddings import EmbeddingBody
from apps.api.schema.generation import ChatBody, CompletionBody, GenerateBody
from apps.api.schema.responses import ResponseBody
from apps.api.schema.socket import SocketMessage
from inference import messages
from inference.embedded import EmbeddedValkey
from sluice.routes import RouteMatcher, all_routes, is_canonical
from tests.apps.api import live
from tests.support import eventually

# The clients here are cut off in the middle on purpose; their own leavings are no finding.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

SECONDS = float(os.environ.get("SLUICE_FUZZ_SECONDS", "10"))
EXAMPLES = int(os.environ.get("SLUICE_FUZZ_EXAMPLES", "300"))
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

BODIES = (ChatBody, CompletionBody, GenerateBody, ResponseBody, EmbeddingBody, SocketMessage)
DECODERS: list[Decoder[Any]] = [Decoder(kind) for kind in BODIES]  # type: ignore[arg-type]
NAMES = sorted({n for kind in BODIES[:5] for n in kind.__struct_fields__} | {"type", "id", "request_id", "after"})

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -0.0])
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["", "\x00", "\ud7ff", "<|im_start|>", "user", "json_schema", "data:", "../..", "a" * 300])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), values, max_size=8)
COUNTS: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    yield
    print("\nfuzz:", ", ".join(f"{name} {n}" for name, n in sorted(COUNTS.items())))


def decoded(raw: bytes) -> None:
    """Every decoder takes it or says in the documented form what is wrong."""
    for decode in DECODERS:
        COUNTS["bodies decoded"] += 1
        try:
            decode(raw)
        except ApiError as error:
            assert error.status == 400
            assert set(json.loads(error.body())["error"]) == {"message", "type", "param", "code"}
            assert len(error.body()) < 4096 + 6 * len(raw)


# --- Parsers ---


@fuzz
@given(bodies)
def test_objects(body: dict[str, Any]) -> None:
    decoded(json.dumps(body).encode())


@fuzz
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_bytes(raw: bytes) -> None:
    decoded(raw)


@fuzz
@given(bodies, st.data())
def test_broken_json(body: dict[str, Any], data: st.DataObject) -> None:
    raw = bytearray(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **body}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"a":' * 100_000, b'"' + b"\\u0000" * 100_000 + b'"', b"1" * 500_000]
)
def test_deep_and_long(raw: bytes) -> None:
    started = time.monotonic()
    decoded(raw)
    assert time.monotonic() - started < 5


@fuzz
@given(st.binary(max_size=200))
def test_messages_between_processes(raw: bytes) -> None:
    """What is not one of our messages is a DecodeError; nothing else comes out, nothing is executed."""
    for name in ("frame", "server_message", "worker_message", "job", "worker_beat", "server_beat", "ending"):
        COUNTS["process messages decoded"] += 1
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            getattr(messages, f"decode_{name}")(raw)


@fuzz
@given(values)
def test_well_formed_messages_of_a_wrong_kind(value: Any) -> None:
    try:
        raw = msgspec.msgpack.encode(value)
    except (OverflowError, msgspec.EncodeError, UnicodeEncodeError):
        return
    for name in ("frame", "server_message", "worker_message", "job", "worker_beat", "server_beat", "ending"):
        COUNTS["process messages decoded"] += 1
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            getattr(messages, f"decode_{name}")(raw)


MATCHER = RouteMatcher(all_routes())
TEMPLATES = [r.template for r in all_routes()]


@fuzz
@given(st.sampled_from(TEMPLATES), st.text(max_size=12), st.binary(max_size=12), st.integers(0, 30))
def test_paths(template: str, text: str, raw: bytes, at: int) -> None:
    COUNTS["paths matched"] += 1
    path = template[:at] + text + template[at:]
    if is_canonical(path, path.encode("utf-8", "surrogatepass") + raw):
        assert path.startswith("/") and "//" not in path and "\\" not in path
    for kind in ("http", "websocket"):
        found = MATCHER.match(kind, path) if path else None
        assert found is None or found[0].kind == kind


@fuzz
@given(st.text(max_size=80) | st.from_regex(r"sk-sluice-\S{0,60}"), st.binary(max_size=60))
def test_credentials(text: str, raw: bytes) -> None:
    COUNTS["credentials parsed"] += 1
    assert keyformat.split_key(text) is None or text.startswith("sk-sluice-")
    for value in (raw, text.encode("utf-8", "surrogatepass"), b"http://localhost" + raw):
        scope = {
            "type": "websocket",
            "scheme": "ws",
            "path": "/",
            "headers": [(b"host", b"localhost"), (b"origin", value)],
        }
        if origin.origin_allowed(scope):
            assert urlsplit(value.decode("latin-1")).hostname == "localhost", value


# --- A live server ---


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, empty_valkey: EmbeddedValkey) -> Iterator[live.Site]:
    running = live.start(tmp_path_factory.mktemp("fuzz"), empty_valkey)
    yield running
    live.stop(running)


async def assert_unharmed(site: live.Site) -> None:
    """It answers as before, its workers are the same ones, and nothing has been logged as a failure."""
    assert [p.poll() for p in site.processes] == [None, None]
    async with site.client() as client:
        reply = await client.post("/v1/chat/completions", json=live.chat())
        assert reply.status_code == 200, reply.text
    log = Path(site.log).read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]


def http_case(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """A method, a path and what to send; about half of it nearly right."""
    route = rng.choice([r for r in all_routes() if r.kind == "http" and "inflight" not in r.path])
    path = route.template
    for name in ("{request_id}", "{response_id}", "{model}"):
        path = path.replace(name, rng.choice(["x", "%00", "é", "a" * 300, "..", "chatcmpl-1", "%ff", "demo", "'\"<>"]))
    if rng.random() < 0.3:
        path += "?" + rng.choice(["after=-1", "after=" + "9" * 50, "a=1&" * 200, "%ff=%00", "ticket=x", "after=\u0661"])
    method = rng.choice([*route.methods, "GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD"])
    headers: dict[str, Any] = {}
    if rng.random() < 0.3:
        headers["last-event-id"] = rng.choice(["-1", "1e3", "9" * 12, "0", "1,2", "\u0661".encode()])
    if rng.random() < 0.2:
        headers["content-type"] = rng.choice(["", "text/plain", "application/xml", "multipart/form-data", "x" * 500])
    base: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for _ in range(rng.randrange(4)):
        base[rng.choice(NAMES)] = odd_value(rng)
    raw = json.dumps(base).encode()
    if rng.random() < 0.3:
        cut = rng.randrange(len(raw))
        raw = raw[:cut] + rng.randbytes(rng.randrange(8)) + raw[cut + rng.randrange(4) :]
    return method, path, {"content": raw, "headers": headers}


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    odd = [
        None,
        True,
        0,
        -1,
        2**31,
        2**63,
        1e308,
        "",
        "x",
        "\x00",
        "\u202e",
        [],
        {},
        "a" * 5000,
        [[]],
        {"type": "text"},
    ]
    if depth < 3 and rng.random() < 0.3:
        inner = [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return inner if rng.random() < 0.5 else dict(zip(rng.sample(NAMES, len(inner)), inner, strict=True))
    return rng.choice(odd)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_http(site: live.Site) -> None:
    rng = random.Random(20)
    until = time.monotonic() + SECONDS

    async def go_on(client: httpx.AsyncClient, own: random.Random) -> None:
        while time.monotonic() < until:
            method, path, extra = http_case(own)
            reply = await client.request(method, path, **extra)
            COUNTS[f"http {reply.status_code // 100}xx"] += 1
            assert reply.status_code < 500, (method, path, extra, reply.text[:500])

    async with site.client() as client:
        await asyncio.gather(*(go_on(client, random.Random(rng.random())) for _ in range(8)))
    await assert_unharmed(site)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_raw_bytes_on_the_socket(site: live.Site) -> None:
    """What is no HTTP gets an error or the end of the connection, at once."""
    rng = random.Random(21)
    host, _, port = site.host.partition(":")
    until = time.monotonic() + SECONDS / 2
    good = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {site.host}\r\nContent-Length: 2\r\nX-A: b\r\n\r\n{{}}".encode()
    )
    while time.monotonic() < until:
        raw = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(3)] = rng.choice(
                [
                    b"\x00",
                    b"\r",
                    b"\n",
                    b"\r\n\r\n",
                    b":",
                    b" ",
                    b"\xff",
                    b"%",
                    rng.randbytes(4),
                    b"Transfer-Encoding: chunked\r\n",
                ]
            )
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while part := sock.recv(4096):
                    answer += part
        COUNTS["raw requests"] += 1
        if answer:
            assert answer.startswith(b"HTTP/1.1 ") and answer[9:10] in b"1234", (bytes(raw), answer[:300])
    asyncio.run(assert_unharmed(site))


@pytest.mark.parametrize("query", ["a=1&" * 200, "ticket=" + "x" * 3000, "ticket=%00%ff", "ticket=1&ticket=2"])
async def test_websocket_query(site: live.Site, query: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with connect(f"ws://{site.host}/ws/v1/stream?{query}", subprotocols=["sluice.v1"]):  # type: ignore[list-item]
            pass
    assert refused.value.response.status_code in (401, 403)


@contextlib.asynccontextmanager
async def opened(site: live.Site) -> AsyncIterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {site.key}"}
    url = f"ws://{site.host}/ws/v1/stream"
    async with connect(url, additional_headers=headers, subprotocols=["sluice.v1"], max_queue=None) as ws:  # type: ignore[list-item]
        yield ws


def socket_message(rng: random.Random) -> str | bytes:
    kind = rng.choice(["generate", "cancel", "attach", "ping", "accepted", "", None, 1])
    message: dict[str, Any] = {"type": kind, "id": rng.choice(["a", "b", "", "x" * 200, 1, None])}
    if kind == "generate":
        message |= {"model": "demo", "prompt": "x", "max_tokens": 3}
        if rng.random() < 0.5:
            return json.dumps({**message, "id": f"{rng.random()}", "max_tokens": rng.randrange(1, 60)})
    for _ in range(rng.randrange(3)):
        message[rng.choice(NAMES)] = odd_value(rng)
    text = json.dumps(message)
    if rng.random() < 0.2:
        cut = rng.randrange(len(text))
        text = text[:cut] + rng.choice(["", "\x00", "}", '"', "\U0001f600", "[" * 2000]) + text[cut + 1 :]
    return text.encode() if rng.random() < 0.1 else text


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_websocket(site: live.Site) -> None:
    """Whatever is sent gets a message of ours or a close code of ours, and never 1011 (internal error)."""
    until = time.monotonic() + SECONDS

    async def listen(ws: ClientConnection) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            async for raw in ws:
                message = json.loads(raw)
                COUNTS[f"ws {message['type']}"] += 1
                if message["type"] == "error":
                    assert message["error"]["code"] not in ("internal", "internal_error"), message

    async def go_on(rng: random.Random) -> None:
        while time.monotonic() < until:
            async with opened(site) as ws:
                listening = asyncio.create_task(listen(ws))
                with contextlib.suppress(websockets.ConnectionClosed):
                    for _ in range(rng.randrange(1, 60)):
                        await ws.send(socket_message(rng))
                        COUNTS["ws messages sent"] += 1
                    await ws.send('{"type": "ping"}')
                if rng.random() < 0.3:
                    ws.transport.abort()
                await ws.close()
                await listening
                COUNTS[f"ws closed {ws.close_code}"] += 1
                assert ws.close_code != 1011

    await asyncio.gather(*(go_on(random.Random(n)) for n in range(6)))
    await assert_unharmed(site)


def accepted_message(rng: random.Random, ref: str) -> dict[str, Any]:
    """A ``generate`` that is right in every field, with values from all over what is allowed."""
    message: dict[str, Any] = {"type": "generate", "id": ref, "model": rng.choice(["demo", "slow"])}
    message["max_tokens"] = rng.choice([1, 2, 7, rng.randrange(1, 200)])
    text = rng.choice(["x", "<|im_end|>", "\u202e\U0001f600 é", "a b " * rng.randrange(1, 60), "</s>[INST]"])
    if rng.random() < 0.5:
        message["prompt"] = text
    else:
        turns = [("user", text), ("assistant", "ok"), ("user", "and?")][: rng.choice([1, 3])]
        message["messages"] = [{"role": role, "content": content} for role, content in turns]
        if rng.random() < 0.3:
            message["messages"].insert(0, {"role": "system", "content": text})
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0.0, 1, 2.0, None],
        "top_p": [0, 0.5, 1, None],
        "top_k": [-1, 0, 1, 2**31],
        "min_p": [0, 0.1, 1],
        "seed": [0, 1, 2**31, -1, None],
        "presence_penalty": [-2, 0, 2.0],
        "frequency_penalty": [-2.0, 0.5],
        "repetition_penalty": [0.5, 1, 10],
        "stop": ["\n", "zz", ["a", "b"], [], None],
        "ignore_eos": [True, False],
        "priority": ["low", "normal", "high"],
        "timeout": [1, 30, 0.5],
        "resumable": [True, False],
    }
    for name in rng.sample(sorted(choices), rng.randrange(6)):
        message[name] = rng.choice(choices[name])
    return message


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_websocket_generations(site: live.Site) -> None:
    """What is accepted, too: answers under way get cancelled, attached to, left, doubled, and mixed with junk.

    Each accepted one is answered by ``done`` or ``error``, unless its socket was left first.
    """
    until = time.monotonic() + SECONDS
    known: list[str] = []

    async def listen(ws: ClientConnection, open_refs: set[str]) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            async for raw in ws:
                message = json.loads(raw)
                COUNTS[f"wsgen {message['type']}"] += 1
                ref = message.get("id")
                if message["type"] == "accepted":
                    known.append(message["request_id"])
                    open_refs.add(ref)
                elif message["type"] == "done":
                    open_refs.discard(ref)
                elif message["type"] == "error":
                    assert message["error"]["code"] not in ("internal", "internal_error"), message
                    open_refs.discard(ref)

    def act(rng: random.Random, number: int, refs: list[str]) -> dict[str, Any]:
        kind = rng.choices(["generate", "cancel", "attach", "ping", "double"], [60, 12, 8, 8, 12])[0]
        if kind == "cancel" and refs:
            return {"type": "cancel", "id": rng.choice(refs)}
        if kind == "attach" and known:
            return {"type": "attach", "id": f"r{number}", "request_id": rng.choice(known), "after": rng.randrange(4)}
        if kind == "ping":
            return {"type": "ping"}
        ref = rng.choice(refs) if kind == "double" and refs else f"g{number}"
        refs.append(ref)
        COUNTS["wsgen generations asked for"] += 1
        return accepted_message(rng, ref)

    async def go_on(rng: random.Random) -> None:
        while time.monotonic() < until:
            open_refs: set[str] = set()
            refs: list[str] = []
            async with opened(site) as ws:
                listening = asyncio.create_task(listen(ws, open_refs))
                with contextlib.suppress(websockets.ConnectionClosed):
                    for number in range(rng.randrange(5, 30)):
                        await ws.send(json.dumps(act(rng, number, refs)))
                        if rng.random() < 0.1:
                            await ws.send(socket_message(rng))
                        await asyncio.sleep(rng.choice([0, 0, 0.01, 0.05]))
                if rng.random() < 0.3:
                    ws.transport.abort()
                elif rng.random() < 0.7:
                    await eventually(
                        lambda end=listening, waiting=open_refs: end.done() or not waiting,
                        30,
                        what=f"an end of each of {open_refs}",
                    )
                await ws.close()
                await listening
                COUNTS[f"wsgen closed {ws.close_code}"] += 1
                assert ws.close_code != 1011

    await asyncio.gather(*(go_on(random.Random(100 + n)) for n in range(6)))
    asked, accepted = COUNTS["wsgen generations asked for"], COUNTS["wsgen accepted"]
    assert accepted > 0.3 * asked, f"{accepted} of {asked} were accepted: most of this tests refusals"
    await eventually(lambda: nothing_runs(site), 40, every=0.5, what="nothing runs any more")
    await assert_unharmed(site)


async def nothing_runs(site: live.Site) -> bool:
    async with redis_async.Redis.from_url(site.env["REDIS_URL"]) as redis:
        prefix = site.env.get("SLUICE_REDIS_PREFIX", "sluice:")
        # Resumable ones that nobody reads any more may go on until the end of their time.
        return bool(await redis.zcard(f"{prefix}live") == await redis.zcard(f"{prefix}detached"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_raw_websocket_frames(site: live.Site) -> None:
    """Frames that no client library would send: reserved bits, wrong lengths, no mask, broken UTF-8, endless pieces."""
    rng = random.Random(22)
    host, _, port = site.host.partition(":")
    hello = (
        f"GET /ws/v1/stream HTTP/1.1\r\nHost: {site.host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Protocol: sluice.v1\r\nAuthorization: Bearer {site.key}\r\n\r\n"
    ).encode()
    until = time.monotonic() + SECONDS / 2
    while time.monotonic() < until:
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(hello)
            assert sock.recv(4096).startswith(b"HTTP/1.1 101")
            with contextlib.suppress(OSError):
                sock.settimeout(0.5)
                for _ in range(rng.randrange(1, 12)):
                    first = rng.choice([0x81, 0x82, 0x80, 0x01, 0x88, 0x89, 0x8A, rng.randrange(256)])
                    body = rng.randbytes(rng.randrange(40))
                    length = rng.choice([len(body), len(body), rng.randrange(126)]) | rng.choice([0x80, 0x80, 0])
                    sock.sendall(bytes([first, length]) + rng.randbytes(4) + body)
                    COUNTS["ws raw frames"] += 1
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    asyncio.run(assert_unharmed(site))
