"""The deployment that ``make prove-hosts`` disturbs: every host a network namespace of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from benchmarks.processes import family
from inference.config import Config
from inference.embedded import find_binary
from inference.errors import StoreUnavailable
from inference.messages import decode_ending
from inference.redisio import Commander, connect
from inference.store import RequestStore, StoreViews
from proofs import network
from proofs.haproxy import HAProxy
from proofs.load import Load
from proofs.rollout import started
from tests.faults.harness import Process, database
from tests.support import eventually

ROOT = Path(__file__).resolve().parent.parent
ADDRESSES = {
    "clients": "10.77.0.1", "edge": "10.77.0.2", "s1": "10.77.0.11", "s2": "10.77.0.12",
    "p1": "10.77.0.21", "p2": "10.77.0.22", "r1": "10.77.0.31", "r2": "10.77.0.32",
}  # fmt: skip
SENTINELS = ("edge", "r1", "r2")
PORT, REDIS_PORT, SENTINEL_PORT = 8000, 6379, 26379
RATE = 25
PROMPTS = [("a short answer", 20), ("an answer", 60), ("another answer", 100), ("a long answer", 200)]
CLIENTS = ["sse"] * 3 + ["json"] * 2 + ["ws"] * 2 + ["ws-kept"] * 2 + ["resumable"] * 3


class Hosts:
    """The deployment, one process list for all hosts."""

    def __init__(self, folder: Path, control: Path, prefix: str) -> None:
        self.folder = folder
        self.control = control
        self.prefix = prefix
        self.processes: dict[str, Process] = {}
        self.key = ""
        self.env = {
            "REDIS_URL": "redis+sentinel://"
            + ",".join(f"{ADDRESSES[h]}:{SENTINEL_PORT}" for h in SENTINELS) + "/main",
            "SLUICE_MODELS": f"scripted=scripted:rate={RATE},context=20000,slots=16",
            "SLUICE_HISTORY_SIZE": "1000000",
            "SLUICE_DEVICES": "cpu",
            "SLUICE_ALLOWED_HOSTS": "*",
            "SLUICE_DEBUG": "1",
            "DJANGO_SETTINGS_MODULE": "sluice.settings",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
        }  # fmt: skip
        self.proxy = HAProxy(
            folder, PORT, [f"{h} {ADDRESSES[h]}:{PORT}" for h in ("s1", "s2")], address=ADDRESSES["edge"],
            retries=2,
        )  # fmt: skip

    def spawn(self, name: str, host: str, command: list[str]) -> Process:
        full = ["ip", "netns", "exec", self.prefix + host, *command]
        self.processes[name] = Process(full, {**os.environ, **self.env}, self.folder / f"{name}.log")
        return self.processes[name]

    def change(self, host: str, **wanted: Any) -> None:
        network.change(self.control, port=host, **wanted)

    async def start(self) -> Load:
        """Everything up and serving, and the answers learnt."""
        self.env["DATABASE_URL"], self.key = await asyncio.to_thread(database, self.folder)
        await self._start_redis()
        manage = [sys.executable, str(ROOT / "manage.py")]
        for host in ("p1", "p2"):
            self.spawn(host, host, [*manage, "runworker"])
        for host in ("s1", "s2"):
            self.spawn(host, host, [*manage, "serve", "--host", "0.0.0.0", "--port", str(PORT)])
        await started(self.spawn("haproxy", "edge", self.proxy.command), self.folder / "haproxy.sock")
        config = Config.from_env(self.env)
        self.redis = Commander(lambda: connect(config.redis_url, timeout=5.0, client_name="proof"), name="proof")
        self.redis.start()
        self.store = RequestStore(self.redis, config)
        self.views = StoreViews(self.redis, self.store.keys)
        await eventually(self.serves, 60, every=0.2, what="both servers and both workers serve")
        load = Load(f"http://{ADDRESSES['edge']}:{PORT}", self.key, CLIENTS, PROMPTS)
        await load.learn()
        return load

    async def _start_redis(self) -> None:
        valkey = find_binary()
        for host in ("r1", "r2"):
            command = [valkey, "--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "",
                       "--appendonly", "no", "--dir", str(self.folder), "--dbfilename", f"{host}.rdb"]  # fmt: skip
            if host == "r2":
                command += ["--replicaof", ADDRESSES["r1"], str(REDIS_PORT)]
            self.spawn(f"redis-{host}", host, command)
        for host in SENTINELS:
            path = self.folder / f"sentinel-{host}.conf"
            path.write_text(
                f"port {SENTINEL_PORT}\nbind 0.0.0.0\nprotected-mode no\ndir {self.folder}\n"
                f"sentinel monitor main {ADDRESSES['r1']} {REDIS_PORT} 2\n"
                "sentinel down-after-milliseconds main 2000\nsentinel failover-timeout main 10000\n"
            )
            self.spawn(f"sentinel-{host}", host, [valkey, str(path), "--sentinel"])
        await eventually(self._sentinels_agree, 30, every=0.2, what="three Sentinels know a primary with a replica")

    async def _sentinels_agree(self) -> bool:
        rows = [await self.ask_sentinel(host, "SENTINEL", "MASTER", "main") for host in SENTINELS]
        return all(r.get(b"num-slaves") == b"1" and r.get(b"num-other-sentinels") == b"2" for r in rows)

    async def ask_sentinel(self, host: str, *command: str) -> Any:
        """A Sentinel's answer; a reply of pairs as a dict, empty where it does not answer."""
        client = connect(f"redis://{ADDRESSES[host]}:{SENTINEL_PORT}/0", timeout=2.0, client_name="proof")
        try:
            client.response_callbacks.clear()
            reply = await client.execute_command(*command)
        except (OSError, RedisError):
            return {}  # not up yet; whoever waits has a deadline
        finally:
            await client.aclose()
        return dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else reply

    async def primary(self) -> str:
        """The host that the Sentinel on the load balancer takes for the primary."""
        reply = await self.ask_sentinel("edge", "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        address = next(iter(reply), b"").decode() if reply else ""
        return next((h for h, a in ADDRESSES.items() if a == address), "")

    async def serves(self) -> bool:
        """Both workers beat, and the load balancer takes both servers for ready."""
        try:
            ready = [w for w in await self.views.workers() if w.state == "ready"]
            return len(ready) == 2 and await self.proxy.up("s1") and await self.proxy.up("s2")
        except (StoreUnavailable, OSError):
            return False

    async def quiet(self) -> bool:
        """No record, and no worker that holds or runs anything."""
        try:
            workers = await self.views.workers()
            held = sum(w.held + w.stats.running + w.stats.waiting for w in workers)
            return await self.views.count() == 0 and held == 0 and len(workers) == 2
        except StoreUnavailable:
            return False

    async def endings(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for raw in await self.redis.call("LRANGE", self.store.keys.history, 0, -1):
            ending = decode_ending(raw)
            found.setdefault(ending.id, []).append(ending)
        return found

    async def server_id(self, host: str) -> str:
        pid = self.processes[host].pid
        return next(s.id for s in await self.views.servers() if s.pid == pid)

    async def worker_of(self, host: str) -> str:
        """Id of the worker of a pool's host."""
        pool = self.processes[host].pid
        return next(w.id for w in await self.views.workers() if w.pid in family(pool))

    def destroy(self) -> None:
        for process in self.processes.values():
            process.destroy()
