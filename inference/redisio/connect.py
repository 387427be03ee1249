"""One place that turns ``REDIS_URL`` into a client.

Schemes: ``redis://``, ``rediss://`` (TLS), ``unix://`` and
``redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]``
(``rediss+sentinel`` for TLS to the data nodes).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import hiredis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from inference.errors import ConfigError


def connect(url: str, *, timeout: float, client_name: str) -> Redis:
    """A client with at most one connection in use at a time by its owner.

    The client never retries by itself: a command whose reply was lost may have
    been applied, and only the caller knows whether it may be sent again.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "socket_keepalive": True,
        "client_name": client_name,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    parts = _parts(url)
    if parts.scheme in ("redis+sentinel", "rediss+sentinel"):
        return _sentinel(parts, options)
    if parts.scheme == "unix":
        del options["socket_keepalive"]
    try:
        client = Redis.from_url(url, **options)
    except ValueError as exc:
        raise ConfigError(f"REDIS_URL cannot be understood: {exc}") from exc
    _pack_in_c(client)
    return client


def _parts(url: str) -> SplitResult:
    """The parts of the address.

    What a parser says of a malformed one quotes it, and a password that is not percent-encoded is what makes
    it malformed. So nothing of it is repeated.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme in ("redis", "rediss"):
            parts.port  # noqa: B018 - it is parsed here
    except ValueError:
        raise ConfigError(
            "REDIS_URL cannot be understood; as in redis://user:password@host:6379/0, where characters such as "
            "/ ? # @ [ of a password are percent-encoded"
        ) from None
    return parts


class _Packing:
    """Packs commands with hiredis. The asyncio client does it in Python, which was half of a worker's work."""

    def pack_command(self, *args: Any) -> list[bytes]:
        name = args[0] if isinstance(args[0], bytes) else args[0].encode()
        return [hiredis.pack_command((*name.split(), *args[1:]))]


_made: dict[type, type] = {}


def _pack_in_c(client: Redis) -> None:
    pool = client.connection_pool
    plain = pool.connection_class
    if plain not in _made:
        _made[plain] = type(f"Packing{plain.__name__}", (_Packing, plain), {})
    pool.connection_class = _made[plain]


def _sentinel(parts: SplitResult, options: dict[str, Any]) -> Redis:
    location = parts.netloc.rpartition("@")[2]
    nodes: list[tuple[str, int]] = []
    for node in location.split(","):
        host, _, port = node.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                "REDIS_URL: what stands for a sentinel's address is not host:port, as in "
                "redis+sentinel://host:26379,host2:26379/mymaster; characters such as / ? # of a password are "
                "percent-encoded"
            )
        nodes.append((host, int(port)))
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ConfigError("REDIS_URL names no sentinel service, as in redis+sentinel://host:26379/mymaster")
    if db and not db.isdigit():
        raise ConfigError("REDIS_URL: the database, which stands after the service, is not a number")
    userinfo = parts.netloc.rpartition("@")[0]
    user, _, password = userinfo.partition(":")
    query = parse_qs(parts.query)
    sentinel_options = {k: options[k] for k in ("socket_timeout", "socket_connect_timeout", "protocol")}
    if "sentinel_password" in query:
        sentinel_options["password"] = query["sentinel_password"][0]
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        nodes,
        sentinel_kwargs=sentinel_options,
        username=unquote(user) or None,
        password=unquote(password) or None,
        db=int(db or 0),
        ssl=parts.scheme.startswith("rediss"),
        **options,
    )
    master: _Master = sentinel.master_for(service, redis_class=_Master)
    master.nodes = sentinel.sentinels
    _pack_in_c(master)
    return master


class _Master(Redis):
    """The master's client; closing it also closes the connections to the sentinels that named it."""

    nodes: list[Redis]

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for node in self.nodes:
            await node.aclose()
