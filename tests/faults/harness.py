"""Real processes to break: Valkey on a port, pools, API servers, and clients on raw sockets.

A :class:`Rig` owns everything it starts and takes it down whatever happens.
Nothing here waits by sleeping: each wait is on an event, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import redis.asyncio as redis_async
from redis.exceptions import RedisError
from websockets.asyncio.client import ClientConnection

from inference import multiproc
from inference.config import Config
from inference.embedded import find_binary
from inference.errors import StoreUnavailable
from inference.messages import Abort, Ending, decode_ending, decode_worker_message
from inference.redisio import Commander, connect
from inference.store import AuditReport, RequestStore, StoreViews, audit
from tests.conftest import ROOT
from tests.faults import ledger
from tests.platform.metrics_site import Sample
from tests.support import eventually, find_free_port

#: Times that make the tests quick; the bounds of the table are computed from these.
BEAT, TTL, REAP, CHECK = 0.25, 2.0, 0.25, 0.25
#: What a bound may be missed by on a busy machine with two cores, seconds.
SLACK = 3.0
METRICS_TOKEN = "scrapes"
MODEL = "scripted=scripted:rate=50,faults=1,context=100000,slots=8"


class Process:
    """A child process with its output in a file."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.path = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=ROOT,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for the signal that ended it; ``None`` while it runs."""
        return self._popen.poll()

    def alive(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        if self.alive():
            self._popen.send_signal(number)

    def log(self) -> str:
        return self.path.read_text(errors="replace")

    async def wait(self, timeout: float = 20.0) -> int:
        """Exit status; fails with the end of the log where it does not end in time."""
        await eventually(lambda: not self.alive(), timeout, what=f"pid {self.pid} to end; log:\n{self.log()[-3000:]}")
        return self._popen.returncode

    def destroy(self) -> None:
        if self.alive():
            self._popen.send_signal(signal.SIGCONT)
            self._popen.kill()
        self._popen.wait()


class Valkey:
    """A server on a TCP port that keeps its address when it is restarted; nothing is kept on disk."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = find_free_port()
        self._folder = folder
        self._arguments = arguments
        self.process: Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> Self:
        command = [find_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._folder), *self._arguments]
        self.process = Process(command, dict(os.environ), self._folder / f"valkey-{self.port}.log")
        await eventually(self._answers, what="Valkey answers")
        return self

    async def _answers(self) -> bool:
        client = redis_async.Redis(port=self.port, socket_timeout=1)
        try:
            return bool(await client.ping())
        except RedisError:
            return False
        finally:
            await client.aclose()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.signal(number)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.signal(signal.SIGKILL)
        await self.process.wait()

    def destroy(self) -> None:
        if self.process is not None:
            self.process.destroy()


class Proxy:
    """A TCP proxy that delays, holds back (no FIN, no RST: as a pulled cable) or cuts connections."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        self._through = asyncio.Event()
        self._through.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def drop(self) -> None:
        """Nothing passes any more; both sides believe the connection to be well."""
        self._through.clear()

    def restore(self) -> None:
        self._through.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(up_writer)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                at, data = await due.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                await self._through.wait()
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()

        delivery = asyncio.create_task(deliver())
        try:
            while True:
                data = await source.read(65536)
                due.put_nowait((loop.time() + self.delay, data))
                if not data:
                    await delivery
                    return
        except OSError:
            sink.transport.abort()
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
            self._writers.discard(sink)


class Rig:
    """A deployment of real processes around one Valkey; use with ``async with``."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self._database = asyncio.Lock()
        self.settings: dict[str, str] = {
            "SLUICE_MODELS": MODEL,
            "SLUICE_HEARTBEAT_INTERVAL": str(BEAT),
            "SLUICE_HEARTBEAT_TTL": str(TTL),
            "SLUICE_REAP_INTERVAL": str(REAP),
            "SLUICE_CHECK_INTERVAL": str(CHECK),
            "SLUICE_PING_INTERVAL": "1",
            "SLUICE_DEVICES": "cpu",
            "SLUICE_DEBUG": "1",
            "SLUICE_METRICS_TOKEN": METRICS_TOKEN,
            "DJANGO_SETTINGS_MODULE": "sluice.settings",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
            # All processes count here, so that what a killed one has counted is not lost.
            multiproc.VARIABLE: str(folder / "counts"),
            **{k: str(v) for k, v in settings.items()},
        }
        (folder / "counts").mkdir(exist_ok=True)
        self.aborts: list[tuple[str, str]] = []
        self.key = ""
        self.uncounted = ledger.Allowance()
        """What this test knows to be missing from the metrics; see :mod:`tests.faults.ledger`."""
        self.servers: list[Server] = []
        self._stack = AsyncExitStack()
        self._made = 0
        self._processes: list[Process] = []

    async def __aenter__(self) -> Self:
        self.valkey = Valkey(self.folder)
        self._stack.callback(self.valkey.destroy)
        await self.valkey.start()
        self.settings.setdefault("REDIS_URL", self.valkey.url)
        self.config = Config.from_env(self.settings, redis_url=self.valkey.url)
        self.redis = Commander(lambda: connect(self.valkey.url, timeout=2.0, client_name="tests"), name="tests")
        self.redis.start()
        self._stack.push_async_callback(self.redis.stop)
        self.store = RequestStore(self.redis, self.config)
        self.views = StoreViews(self.redis, self.store.keys)
        monitor = asyncio.create_task(self._count_aborts())
        self._stack.push_async_callback(_end, monitor)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await hang_up()
        for process in reversed(self._processes):
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        with contextlib.suppress(AssertionError):  # who is slow is killed
            await eventually(lambda: not any(p.alive() for p in self._processes), 3.0)
        for process in self._processes:
            process.destroy()
        await self._stack.aclose()
        if exc[0] is not None:
            self.show()

    def show(self) -> None:
        """Print the end of every log."""
        for process in self._processes:
            print(f"--- {process.path.name}\n{process.log()[-4000:]}")

    async def _count_aborts(self) -> None:
        """Every abort that is published to a worker, with the worker's id."""
        while True:
            client = redis_async.Redis(port=self.valkey.port)
            pubsub = client.pubsub()
            try:
                await pubsub.psubscribe(self.config.redis_prefix + "to:worker:*")
                while True:
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=1)
                    if message is not None and message["data"]:
                        decoded = decode_worker_message(message["data"])
                        if isinstance(decoded, Abort):
                            self.aborts.append((decoded.id, message["channel"].decode().rpartition(":")[2]))
            except RedisError:
                await asyncio.sleep(0.05)  # until it is there again; nobody else waits for this
            finally:
                await pubsub.aclose()
                await client.aclose()

    def aborts_of(self, request_id: str) -> int:
        return sum(i == request_id for i, _ in self.aborts)

    # -- processes -----------------------------------------------------------------------------------

    def spawn(self, *arguments: str, **settings: Any) -> Process:
        """``manage.py`` with these arguments."""
        self._made += 1
        env = {**os.environ, **self.settings, **{k: str(v) for k, v in settings.items()}}
        process = Process(
            [sys.executable, str(ROOT / "manage.py"), *arguments],
            env,
            self.folder / f"{self._made:02}-{arguments[0]}.log",
        )
        self._processes.append(process)
        return process

    async def command(self, *arguments: str, **settings: Any) -> tuple[int, str]:
        """Run ``manage.py`` to its end: exit status and output."""
        process = self.spawn(*arguments, **settings)
        status = await process.wait(60)
        return status, process.log()

    async def pool(self, workers: int = 1, **settings: Any) -> Process:
        """A pool, once all its workers serve."""
        before = {w.id for w in await self.views.workers()}
        process = self.spawn("runworker", "--workers-per-device", str(workers), **settings)

        async def ready() -> bool:
            assert process.alive(), process.log()
            now = [w for w in await self.views.workers() if w.id not in before]
            return sum(w.state == "ready" for w in now) >= workers

        await eventually(ready, 40, what="the pool's workers serve")
        return process

    async def server(self, **settings: Any) -> Server:
        """An API server, once it is ready. The database and the API key are made with the first."""
        async with self._database:  # servers may be started at once, and have to know the same key
            if not self.key:
                self.settings["DATABASE_URL"], self.key = await asyncio.to_thread(database, self.folder)
        port = find_free_port()
        process = self.spawn("serve", "--port", str(port), **settings)
        server = Server(process, port, self.key)

        async def ready() -> bool:
            assert process.alive(), process.log()
            return await server.get("/readyz") == 200

        await eventually(ready, 40, what="the server is ready")
        server.id = await self._id_of(process.pid)
        self.servers.append(server)
        return server

    async def _id_of(self, pid: int) -> str:
        async def find() -> str:
            return next((s.id for s in await self.views.servers() if s.pid == pid), "")

        return await eventually(find, what="the server's heartbeat")

    async def worker_pid(self, worker: str) -> int:
        return next(w.pid for w in await self.views.workers() if w.id == worker)

    # -- state -----------------------------------------------------------------------------------------

    async def running(self, request_id: str, tokens: int = 1, timeout: float = 15.0) -> Any:
        """The request's view, once it has so many tokens."""

        async def check() -> Any:
            view = await self.views.view(request_id)
            return view if view is not None and view.generated_tokens >= tokens else None

        return await eventually(check, timeout, what=f"{request_id} at {tokens} tokens")

    async def is_quiet(self, known: set[str] | None = None) -> bool:
        """No record, and no worker that holds or runs anything."""
        if await self.views.count():
            return False
        return all(w.held == 0 and w.stats.running == 0 and w.stats.waiting == 0 for w in await self.views.workers())

    async def quiet(self, timeout: float = 10.0, *, since: float | None = None) -> float:
        """Wait for that, then audit. Gives the seconds since ``since`` (or the call)."""
        began = time.monotonic() if since is None else since

        async def check() -> bool:
            try:
                return await self.is_quiet()
            except StoreUnavailable:
                return False

        await eventually(check, timeout, what="nothing in flight")
        took = time.monotonic() - began
        # The heartbeats looked at may have been older than the last request: look at later ones, too.
        # They carry no number by which to tell them.
        await asyncio.sleep(2 * BEAT)
        await eventually(check, timeout, what="nothing in flight, by later heartbeats")
        report: list[AuditReport] = []

        async def clean() -> bool:
            report[:] = [await audit(self.store)]
            assert report[0].findings == []
            return report[0].records == 0

        await eventually(clean, 5, what="a clean audit")
        await eventually(self.is_accounted, 8, every=0.1, what="the metrics to balance")
        return took

    def counted(self, name: str, **labels: str) -> float:
        """The sum of a counter's series over all processes, dead ones included."""
        return sum(value for found, value in self.series(name) if labels.items() <= found.items())

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of a counter."""
        merged = multiproc.Merged(str(self.folder / "counts"), own=False)
        return [(s.labels, s.value) for metric in merged.collect() for s in metric.samples if s.name == name]

    def sums(self) -> dict[str, float]:
        """Those sums that the books are kept with, all of one moment."""
        sums = dict.fromkeys(ledger.NAMES, 0.0)
        for metric in multiproc.Merged(str(self.folder / "counts"), own=False).collect():
            for sample in metric.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
        return sums

    async def is_accounted(self) -> bool:
        """Whether the metrics of all processes balance, and every server's gauges say that nothing is in flight."""
        if any(s.process.status == -signal.SIGKILL for s in self.servers):
            self.uncounted.all_reread = True
        ledger.balance(ledger.read(p.log() for p in self._processes), self.sums(), self.uncounted)
        for server in self.servers:
            if server.process.alive():
                try:
                    sample = await server.scrape()
                except OSError:
                    continue  # it is leaving, and accepts no more
                for name in ledger.AT_REST:
                    assert sample.sum(name) == 0, f"{name} is {sample.sum(name):g} at rest"
                assert all(value >= 0 for value in sample.series.values())
        return True

    async def settled(self, timeout: float = 20.0) -> None:
        """The end of every test: clients hang up, nothing is left in flight, and the books balance."""
        await hang_up()
        self.valkey.signal(signal.SIGCONT)
        for process in self._processes:
            process.signal(signal.SIGCONT)
        await self.quiet(timeout)

    async def ending(self, request_id: str, timeout: float = 15.0) -> Ending:
        """The one summary of a request in the history; fails where it is there twice."""

        async def find() -> list[Ending]:
            try:
                raw = await self.redis.call("LRANGE", self.store.keys.history, 0, -1)
            except StoreUnavailable:
                return []
            return [e for e in map(decode_ending, raw) if e.id == request_id]

        found = await eventually(find, timeout, what=f"an ending of {request_id}")
        assert len(found) == 1
        return found[0]


_DATABASES: dict[str, tuple[bytes, str]] = {}


def database(folder: Path) -> tuple[str, str]:
    """A migrated SQLite database with an API key in it; made once, then copied."""
    path = folder / "db.sqlite3"
    url = f"sqlite:///{path}"
    if not _DATABASES:
        env = {
            **os.environ, "DATABASE_URL": url, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "SLUICE_DEBUG": "1",
        }  # fmt: skip
        run = [sys.executable, str(ROOT / "manage.py")]
        subprocess.run([*run, "migrate", "--verbosity", "0"], env=env, check=True, capture_output=True)
        made = subprocess.run(
            [*run, "apikey", "create", "faults", "--quiet"], env=env, check=True, capture_output=True, text=True
        )
        _DATABASES["db"] = (path.read_bytes(), made.stdout.strip())
    data, key = _DATABASES["db"]
    path.write_bytes(data)
    return url, key


class Server:
    """An API server process and ways to talk to it."""

    def __init__(self, process: Process, port: int, key: str) -> None:
        self.process = process
        self.port = port
        self.key = key
        self.id = ""

    async def get(self, path: str) -> int:
        """Status of a GET, 0 where nobody answers."""
        try:
            async with asyncio.timeout(5):
                exchange = await Exchange.open(self.port, "GET", path, key=self.key)
                await exchange.body()
                await exchange.close()
                return exchange.status
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return 0

    async def scrape(self, token: str = METRICS_TOKEN) -> Sample:
        """What ``/metrics`` says now."""
        exchange = await Exchange.open(self.port, "GET", "/metrics", key=token)
        body = await exchange.body()
        await exchange.close()
        assert exchange.status == 200, body
        return Sample(body.decode())

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> Exchange:
        """Send a request and read the reply's headers."""
        return await Exchange.open(self.port, "POST", path, key=self.key, body=body, **options)

    async def send(self, path: str, body: dict[str, Any], **options: Any) -> Exchange:
        """Send a request and read nothing."""
        return await Exchange.open(self.port, "POST", path, key=self.key, body=body, headers_too=False, **options)


OPEN: list[asyncio.StreamWriter | ClientConnection] = []
"""Connections of clients; a rig closes what a test leaves open."""


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel it, and let it close what it has open."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def hang_up() -> None:
    """Reset every connection that a test has left open."""
    while OPEN:
        each = OPEN.pop()  # named, or it would be collected before it is closed
        each.transport.abort()
    await asyncio.sleep(0)


class Exchange:
    """One HTTP exchange on a socket of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        OPEN.append(writer)
        self.status = 0
        self.headers: dict[str, str] = {}
        self._buffer = b""

    @classmethod
    async def open(
        cls, port: int, method: str, path: str, *, key: str = "", body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None, headers_too: bool = True, receive_buffer: int = 0,
    ) -> Exchange:  # fmt: skip
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**24 if not receive_buffer else 1024)
        self = cls(reader, writer)
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        if data:
            lines.append("Content-Type: application/json")
        lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await writer.drain()
        if headers_too:
            await self.read_headers()
        return self

    async def read_headers(self) -> None:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").strip().split("\r\n")
        self.status = int(first.split()[1])
        for line in rest:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Pieces of the body; ends where the body ends."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        if self.headers.get("transfer-encoding") != "chunked":
            while data := await self.reader.read(65536):
                yield data
            return
        while True:
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            data = await self.reader.readexactly(size + 2)
            if not size:
                return
            yield data[:-2]

    async def body(self) -> bytes:
        return b"".join([c async for c in self.chunks()])

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[str]:
        """Data of each SSE event; comments are left out."""
        buffer = b""
        async for chunk in self.chunks():
            buffer += chunk
            while b"\n\n" in buffer:
                event, _, buffer = buffer.partition(b"\n\n")
                lines = [x[6:] for x in event.decode().split("\n") if x.startswith("data: ")]
                if lines:
                    yield "\n".join(lines)
        assert not buffer, f"the stream ended in the middle of an event: {buffer!r}"

    def abort(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()

    async def close(self) -> None:
        """Close it in the ordinary way."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


async def parallel(count: int, make: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Run ``make(i)`` for all i at once; results in order, exceptions raised."""
    return list(await asyncio.gather(*(make(i) for i in range(count))))
