"""Every setting of the core, in one typed class with its default and unit.

Read from the environment (:mod:`inference.environ`): each field is the variable
``SLUICE_<NAME>`` in capitals, except ``REDIS_URL``. A malformed value raises
:class:`~inference.errors.ConfigError` that names the variable.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

import msgspec

from inference.environ import EnvSettings
from inference.errors import ConfigError

ENGINES = ("transformers", "embed", "openai", "scripted")
DEFAULT_MODEL = "smollm2-135m-instruct"


class ModelSpec(msgspec.Struct, frozen=True):
    """One served model: its public alias and where it comes from.

    Attributes:
        alias: the public name; all that clients, labels and logs ever see.
        engine: ``transformers``, ``embed`` (vectors instead of text), ``openai`` or ``scripted``.
        target: a folder or hub name (``embed``: a folder), an upstream URL (``http://host/v1#name``),
            or, for the scripted engine, options (``rate=50,context=4096``).
            ``default`` means the model that ``manage.py fetchmodel`` brings.
    """

    alias: str
    engine: str
    target: str

    @property
    def kind(self) -> Literal["generate", "embed"]:
        """What the model makes: text, or vectors."""
        return "embed" if self.engine == "embed" else "generate"


def parse_models(text: str) -> list[ModelSpec]:
    """Parse ``SLUICE_MODELS``: ``alias=[engine:]target``, separated by commas or blanks.

    Raises:
        ConfigError: empty, a part without ``=``, or an alias given twice.
    """
    specs: list[ModelSpec] = []
    for part in text.replace(";", " ").split():
        for entry in part.split(",") if "=scripted:" not in part else [part]:
            if not entry:
                continue
            alias, sep, rest = entry.partition("=")
            if not sep or not alias or not rest:
                raise ConfigError(
                    f"SLUICE_MODELS: {entry!r} is not alias=target "
                    "(for instance small=/models/small or big=openai:http://gpu1:8000/v1#big)"
                )
            engine, sep, target = rest.partition(":")
            if not sep or engine not in ENGINES:
                engine, target = "transformers", rest
            specs.append(ModelSpec(alias, engine, target))
    aliases = [s.alias for s in specs]
    if not specs:
        raise ConfigError("SLUICE_MODELS is empty; leave it unset for the default model")
    for alias in aliases:
        if aliases.count(alias) > 1:
            raise ConfigError(f"SLUICE_MODELS: alias {alias!r} is given twice")
    return specs


class Config(EnvSettings, frozen=True, kw_only=True):
    """All settings. Times are seconds unless the name ends in ``_ms``."""

    # Redis
    redis_url: str = ""
    redis_prefix: str = "sluice:"
    redis_timeout: float = 5.0
    redis_outage_limit: float = 15.0

    # Models
    models: str = f"{DEFAULT_MODEL}=default"
    cache_dir: str = ""
    dtype: str = "auto"
    trust_remote_code: bool = False

    # Engine
    max_running: int = 32
    max_queued: int = 256
    cache_tokens: int = 0
    prefill_budget: int = 512
    context_length: int = 0
    default_max_tokens: int = 0
    max_tokens_limit: int = 0

    # Life of a request
    request_timeout: float = 600.0
    queue_timeout: float = 120.0
    max_attempts: int = 2
    resume_grace: float = 60.0
    log_retention: float = 300.0
    history_size: int = 1000

    # Liveness
    heartbeat_interval: float = 1.0
    heartbeat_ttl: float = 5.0
    reap_interval: float = 1.0
    check_interval: float = 1.0
    stall_timeout: float = 120.0

    # Streams
    ping_interval: float = 4.0
    stream_buffer: int = 256
    send_timeout: float = 60.0

    # Pool
    devices: str = "auto"
    workers_per_device: int = 1
    start_timeout: float = 600.0
    drain_timeout: float = 30.0
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"

    def model_specs(self) -> list[ModelSpec]:
        return parse_models(self.models)

    def cache_path(self) -> Path:
        """Where downloaded and converted models live."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(base) / "sluice"

    def __post_init__(self) -> None:
        positive = (
            "redis_timeout redis_outage_limit max_running max_queued prefill_budget request_timeout "
            "queue_timeout max_attempts heartbeat_interval heartbeat_ttl reap_interval check_interval "
            "stall_timeout ping_interval stream_buffer send_timeout workers_per_device start_timeout history_size"
        )
        self.require_positive(positive.split())
        self.require_not_negative(
            "cache_tokens context_length default_max_tokens max_tokens_limit resume_grace log_retention".split()
        )
        self.require_not_negative(["metrics_port"])
        self.require_drain_seconds(["drain_timeout"])
        if self.heartbeat_ttl < 2 * self.heartbeat_interval:
            raise ConfigError(
                f"SLUICE_HEARTBEAT_TTL ({self.heartbeat_ttl} s) must be at least twice "
                f"SLUICE_HEARTBEAT_INTERVAL ({self.heartbeat_interval} s)"
            )
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"SLUICE_DTYPE must be auto, float32, bfloat16 or float16, not {self.dtype!r}")
        if self.redis_url:
            scheme, colon, _ = self.redis_url.partition(":")
            if not colon or scheme.lower() not in ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel"):
                raise ConfigError(
                    "REDIS_URL must start with redis://, rediss://, unix://, redis+sentinel:// "
                    "or rediss+sentinel://, which its value does not"
                )
        parse_models(self.models)


def host_name() -> str:
    return socket.gethostname()
