"""Every setting of the API server, in one typed class with its default and unit.

The core's settings (Redis, models, engines) are in :mod:`inference.config`; these
are the server's own. Each field is the environment variable ``SLUICE_<NAME>`` in
capitals; ``manage.py serve`` has a flag for those that are changed most.
"""

from __future__ import annotations

from typing import Literal

from inference.environ import EnvSettings, env_name
from inference.errors import ConfigError

MEBIBYTE = 1024 * 1024
#: Time that the last phase of a drain may take, seconds.
ENDING_SECONDS = 5.0


class ServerConfig(EnvSettings, frozen=True, kw_only=True):
    """All settings of one API server process. Times are seconds, sizes bytes.

    Attributes:
        pre_drain: how long readiness says 503 while everything is still
            accepted, so that load balancers look away first.
        drain_deadline: how long running streams may go on after that.
        termination_grace: what the platform allows between SIGTERM and
            SIGKILL; ``None`` where it is not known.
        max_body_bytes: largest request body; larger ones get 413.
        max_header_bytes: request line and all headers together; more gets 431.
        read_timeout: for the whole of the headers, again for the whole body, and until
            a WebSocket's handshake has been answered.
        idle_timeout: for a keep-alive connection without a request.
        max_connections: open client connections; more get 503 at once.
        high_water_bytes: unsent bytes of one connection above which its
            handler waits.
        send_timeout: how long it waits before the connection is cut.
        metrics_access: who may read ``/metrics``: ``staff`` (a key with the
            admin scope, or staff), ``loopback`` (also anybody on this machine
            who does not come through a proxy) or ``public``.
        metrics_token: a bearer token that may read ``/metrics``, beside those.
        log_format: ``text`` for people, ``json`` for one object per line.
        dead_peer_timeout: how long sent bytes may stay unacknowledged.
        ws_queue: messages of one WebSocket that may wait for its consumer before
            reading from it pauses; so it does where they are together larger than
            one may be.
        production: insist on a SECRET_KEY, send cookies over TLS only.
        allowed_hosts, csrf_trusted_origins: lists, as Django means them.
        behind_proxy: believe X-Forwarded-For and X-Forwarded-Proto; in production,
            lead browsers that came by plain HTTP to HTTPS.
        hsts_seconds: in production, how long browsers are to insist on HTTPS;
            0 to say nothing.
        hsts_subdomains: and on every host below this one; for the preload list too.
        retention_days: conversations that nobody has touched for so many days are
            deleted; 0 keeps them.
        var_dir: for files of this installation; ``var`` beside manage.py if empty.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    processes: int = 1

    pre_drain: float = 5.0
    drain_deadline: float = 30.0
    termination_grace: float | None = None

    max_body_bytes: int = 4 * MEBIBYTE
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    read_timeout: float = 30.0
    idle_timeout: float = 75.0
    max_connections: int = 4096

    high_water_bytes: int = 64 * 1024
    send_timeout: float = 60.0
    dead_peer_timeout: float = 60.0

    ws_ping_interval: float = 20.0
    ws_ping_timeout: float = 20.0
    ws_max_message_bytes: int = MEBIBYTE
    ws_queue: int = 256

    production: bool = False
    debug: bool = False
    allowed_hosts: str = "localhost,127.0.0.1,[::1]"
    csrf_trusted_origins: str = ""
    behind_proxy: bool = False
    hsts_seconds: int = 365 * 86400
    hsts_subdomains: bool = False
    retention_days: int = 0
    var_dir: str = ""

    metrics_access: Literal["staff", "loopback", "public"] = "staff"
    metrics_token: str = ""
    log_level: str = "INFO"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        self.require_drain_seconds(["pre_drain", "drain_deadline"])
        if self.termination_grace is not None:
            self.require_drain_seconds(["termination_grace"])
        positive = (
            "processes max_body_bytes max_header_bytes max_headers read_timeout idle_timeout max_connections "
            "high_water_bytes send_timeout dead_peer_timeout ws_ping_interval ws_ping_timeout "
            "ws_max_message_bytes ws_queue"
        )
        self.require_positive(positive.split())
        self.require_not_negative(("hsts_seconds", "retention_days"))
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"{env_name('port')} must be between 0 and 65535, not {self.port}")
        if self.log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ConfigError(f"{env_name('log_level')} must be DEBUG, INFO, WARNING or ERROR, not {self.log_level!r}")
        if self.production and self.debug:
            raise ConfigError("SLUICE_DEBUG must not be on together with SLUICE_PRODUCTION")

    @property
    def longest_stop(self) -> float:
        """Seconds from SIGTERM to exit at the very most."""
        return self.pre_drain + self.drain_deadline + ENDING_SECONDS

    def warnings(self) -> list[str]:
        """Settings that are valid alone but cannot add up, each with the value to change."""
        if self.termination_grace is not None and self.longest_stop > self.termination_grace:
            return [
                f"A drain can take {self.longest_stop:g} s (SLUICE_PRE_DRAIN {self.pre_drain:g} + "
                f"SLUICE_DRAIN_DEADLINE {self.drain_deadline:g} + {ENDING_SECONDS:g} to end what is left), but "
                f"SLUICE_TERMINATION_GRACE is {self.termination_grace:g} s: streams would be killed. "
                f"Raise the platform's termination grace to at least {self.longest_stop:g} s, or lower the others."
            ]
        return []

    def hosts(self) -> list[str]:
        return split_list(self.allowed_hosts)


def split_list(text: str) -> list[str]:
    """``"a, b c"`` -> ``["a", "b", "c"]``."""
    return text.replace(",", " ").split()


_current: ServerConfig | None = None


def server_config() -> ServerConfig:
    """The settings this process runs with: those of ``manage.py serve``, else the environment's."""
    global _current
    if _current is None:
        _current = ServerConfig.from_env()
    return _current


def use(config: ServerConfig) -> None:
    """Make ``config`` what :func:`server_config` returns (flags have been merged in)."""
    global _current
    _current = config
