"""Redis with TLS and with a user that may do what Sluice needs alone; the line of the documentation is tested."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from inference.embedded import find_binary
from inference.errors import SluiceError
from inference.redisio import connect
from tests.apps.api import live
from tests.conftest import ROOT, skip_or_fail
from tests.support import eventually_sync, find_free_port

PASSWORD = "only-for-this-test"
DENIED = [
    ("KEYS", "*"), ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "GET", "*"), ("CONFIG", "SET", "dir", "/tmp"),
    ("SHUTDOWN",), ("SAVE",), ("REPLICAOF", "h", "1"), ("MONITOR",), ("ACL", "LIST"), ("CLIENT", "LIST"),
    ("MODULE", "LIST"),
    ("SCRIPT", "FLUSH"), ("FUNCTION", "LIST"), ("SWAPDB", "0", "1"), ("GET", "other:key"), ("SET", "other:key", "x"),
    ("PUBLISH", "other:channel", "x"), ("EVAL", "return redis.call('GET', 'other:key')", "0"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
]  # fmt: skip


def acl_line(version: tuple[int, ...] = (9, 0)) -> str:
    """The ``user`` line of the documentation, for a server of this version."""
    found = re.search(r"^user sluice on .*?(?=^```)", (ROOT / "docs/security.md").read_text(), re.M | re.S)
    assert found, "docs/security.md has no ACL line"
    line = " ".join(found[0].replace("\\\n", " ").split()).replace(">PASSWORD", f">{PASSWORD}")
    return line if version >= (7, 2) else line.replace(" +client|setinfo", "")


def allowed() -> set[str]:
    return {word[1:].partition("|")[0].upper() for word in acl_line().split() if word.startswith("+")}


def certificates(folder: Path) -> None:
    """An authority and a certificate for 127.0.0.1, valid for an hour."""
    now = datetime.datetime.now(datetime.UTC)

    def make(name: str, issuer: Any = None) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer[0].subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
        )
        certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").write_bytes(private)
        return certificate, key

    make("server", make("authority"))
    make("stranger")


@dataclass
class Guarded:
    """A Redis with the documented user; ``root`` is a client that may do everything."""

    url: str
    root: redis.Redis


def tls_binary() -> str | None:
    """A Redis or Valkey server that was built with TLS."""
    for name in (os.environ.get("SLUICE_TEST_TLS_REDIS"), "redis-server", "valkey-server"):
        path = name and shutil.which(name)
        if path and b"libssl" in subprocess.run(["ldd", path], capture_output=True, check=False).stdout:
            return path
    return None


def version(binary: str) -> tuple[int, ...]:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)\.(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.fixture(params=["acl", "tls and acl"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guarded]:
    tls = request.param != "acl"
    binary = tls_binary() if tls else find_binary()
    if binary is None:
        skip_or_fail("no redis-server with TLS on the PATH (Debian: redis-server)")
        return
    port = find_free_port()
    lines = [f"dir {tmp_path}", 'save ""', "bind 127.0.0.1", "user default off", acl_line(version(binary))]
    lines.append(f"user root on >{PASSWORD}-root ~* &* +@all")
    query = ""
    if tls:
        certificates(tmp_path)
        lines += [
            "port 0", f"tls-port {port}", f"tls-cert-file {tmp_path}/server.crt", f"tls-key-file {tmp_path}/server.key",
            f"tls-ca-cert-file {tmp_path}/authority.crt", "tls-auth-clients no",
        ]  # fmt: skip
        query = f"?ssl_ca_certs={tmp_path}/authority.crt"
    else:
        lines.append(f"port {port}")
    (tmp_path / "redis.conf").write_text("\n".join(lines))
    scheme = "rediss" if tls else "redis"
    log = (tmp_path / "redis.log").open("w")
    process = subprocess.Popen([binary, str(tmp_path / "redis.conf")], stdout=log, stderr=log)
    log.close()
    root = redis.Redis.from_url(f"{scheme}://root:{PASSWORD}-root@127.0.0.1:{port}{query}")

    def answers() -> bool:
        assert process.poll() is None, (tmp_path / "redis.log").read_text()
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            return False
        return bool(root.ping())

    try:
        eventually_sync(answers, 20, what="Redis answers")
        yield Guarded(f"{scheme}://sluice:{PASSWORD}@127.0.0.1:{port}/0{query}", root)
    finally:
        root.close()
        process.terminate()
        process.wait(20)


async def use_everything(site: live.Site) -> None:
    """A bit of all: answers, streams, cancelled, re-attached, limited, kept; what operators look at."""
    async with site.client() as client, site.client(site.admin) as admin, site.client(site.limited) as limited:
        assert (await client.post("/v1/chat/completions", json=live.chat())).status_code == 200
        reply = await client.post("/v1/chat/completions", json=live.chat(stream=True, resumable=True))
        assert live.events(reply.text)[-1] == "[DONE]"
        request_id = json.loads(live.events(reply.text)[0])["id"]
        again = await client.get(f"/v1/requests/{request_id}/events", headers={"last-event-id": "1"})
        assert again.status_code == 200
        statuses = [(await limited.post("/v1/chat/completions", json=live.chat())).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        body = live.chat(model="slow", stream=True, max_tokens=400, ignore_eos=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()  # kept: the stream ends with its iterator
            running = json.loads((await anext(lines)).removeprefix("data: "))["id"]
            for method in ("GET", "DELETE"):
                reply = await client.request(method, f"/v1/requests/{running}")
                assert reply.status_code == 200, reply.text
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            await anext(stream.aiter_bytes())  # and gone
        for path in ("/metrics", "/inflight/live", "/v1/models"):
            async with admin.stream("GET", path) as stream:
                assert stream.status_code == 200, path
                await anext(stream.aiter_bytes())


def manage(url: str, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "REDIS_URL": url}
    return subprocess.run(
        [sys.executable, "manage.py", *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.timeout(240)
def test_all_works_as_the_documented_user_and_nothing_else_does(guarded: Guarded, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    site = live.start(folder, guarded)  # type: ignore[arg-type]
    try:
        asyncio.run(use_everything(site))
        (server, pool) = site.processes
        pool.kill()  # its requests are for a reaper
        eventually_sync(lambda: httpx.get(f"{site.url}/readyz").status_code == 503, 30, every=0.1)
    finally:
        live.stop(site)
    done = manage(guarded.url, "inflight", "--audit", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    denied = [entry["object"] for entry in guarded.root.acl_log() if entry["username"] == "sluice"]
    assert denied == []
    log = (folder / "server.log").read_text()
    assert "NOPERM" not in log and "no permissions" not in log.lower()
    used = {name.removeprefix("cmdstat_").partition("|")[0].upper() for name in guarded.root.info("commandstats")}
    assert used - allowed() <= {"ACL", "AUTH", "HELLO", "CONFIG"}, "what root and the server's own modules have called"
    client = redis.Redis.from_url(guarded.url)
    for command in DENIED:
        with pytest.raises(
            redis.exceptions.ResponseError, match=r"(?i)NOPERM|permission|can't (access|run)|ACL failure"
        ):
            client.execute_command(*command)
    client.close()


def test_line_allows_what_the_sources_call_and_no_more() -> None:
    used = {"EVALSHA", "EVAL", "SCRIPT", "CLIENT", "SUBSCRIBE", "UNSUBSCRIBE", "PING", "SELECT"}
    sources = [p for top in ("inference", "apps", "platform") for p in (ROOT / top).rglob("*.py")]
    for path in sources:
        used |= set(re.findall(r'redis\.call\(\s*"([A-Z]+)"', path.read_text()))
        used |= set(re.findall(r'"([A-Z]{3,})", (?:self\.k|key)\b', path.read_text()))
        used |= set(re.findall(r'command = "(Z[A-Z]+)" if .* else "(Z[A-Z]+)"', path.read_text()) and ["ZRANGE"])
    for path in [p for top in ("inference", "apps") for p in (ROOT / top).rglob("*.lua")]:
        used |= set(re.findall(r"redis\.p?call\('([A-Z]+)'", path.read_text()))
    assert used - allowed() == set(), "docs/security.md allows too little"
    assert allowed() - used <= {"ZREVRANGE", "ZSCORE", "SISMEMBER", "LINDEX"}, "docs/security.md allows too much"


@pytest.mark.parametrize("guarded", ["tls and acl"], indirect=True)
async def test_certificate_is_checked(guarded: Guarded, tmp_path: Path) -> None:
    """An authority that did not sign the server's certificate, and no authority at all, are no connection."""
    for query in (f"ssl_ca_certs={tmp_path}/stranger.crt", ""):
        client = connect(f"{guarded.url.partition('?')[0]}?{query}", timeout=5, client_name="test")
        with pytest.raises((redis.exceptions.ConnectionError, SluiceError), match=r"(?i)certificate"):
            await client.ping()
        await client.aclose()
    client = connect(guarded.url, timeout=5, client_name="test")
    assert await client.ping()
    await client.aclose()
