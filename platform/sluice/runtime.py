"""What one API server process has one of: gateway, tokenizers, status, open exchanges.

Everything here belongs to the event loop that serves. ``manage.py serve`` starts
it before it listens; under another ASGI server it starts with the lifespan or with
the first exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from inference import tracing
from inference.config import Config
from inference.errors import NotServing, SluiceError, UnknownModel
from sluice.exchanges import ExchangeRegistry
from sluice.lag import LagSampler
from sluice.status import ServerStatus

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Where this process stands (serving, pausing, ...).
status = ServerStatus()
#: Its open exchanges.
exchanges = ExchangeRegistry()
#: How late its event loop runs.
lag = LagSampler()

#: Threads for work on text (tokenizing, templates): off the loop, and bounded, so that
#: many long prompts queue up here instead of taking every core from the event loop.
TEXT_THREADS = 2
#: After a failed lazy start, how long the next exchanges go without another try, seconds.
RETRY_START = 2.0

#: Objects more than at the last collection before the next one, and how many of these make a bigger one.
GC_THRESHOLDS = (20_000, 20, 50)

#: The :class:`sluice.server.server.SluiceServer` of ``manage.py serve``; ``None`` under other servers.
server: Any = None
#: Where an operator's ``drain`` and ``undrain`` go; set by ``manage.py serve``.
on_command: Callable[[str], None] | None = None

_config: Config | None = None
_gateway: Any = None
_started = False
_start_lock: asyncio.Lock | None = None
_next_try = 0.0
_tokenizers: dict[str, asyncio.Future[Any]] = {}
_unloadable: dict[str, str] = {}
_warm_up: asyncio.Task[None] | None = None
_usage: Any = None
_text_pool: ThreadPoolExecutor | None = None


def config() -> Config:
    """The core's settings of this process."""
    global _config
    if _config is None:
        _config = Config.from_env()
    return _config


def gateway() -> Any:
    """The process's one :class:`inference.gateway.Gateway`.

    Raises:
        NotServing: it could not be started (yet), as while Redis is away.
    """
    if not _started:
        raise NotServing("The service is starting or cannot reach its request store.", retry_after=2.0)
    return _gateway


def started() -> bool:
    return _started


def beat() -> dict[str, Any]:
    """What the server adds to its heartbeat."""
    return {
        "state": str(status.state),
        "exchanges": exchanges.snapshot(),
        "drain_left_seconds": status.seconds_left(),
        "rss_bytes": rss_bytes(),
        "loop_lag_seconds": lag.worst,
    }


def rss_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _command(verb: str) -> None:
    if on_command is not None:
        on_command(verb)


async def start(core: Config | None = None) -> None:
    """Start the gateway in the running loop. Harmless when it is started already.

    Raises:
        inference.errors.SluiceError: Redis does not answer, or a setting is malformed.
    """
    global _config, _gateway, _started, _usage, _warm_up
    if _started:
        return
    from apps.accounts.usage import UsageCollector
    from inference.gateway import Gateway

    if core is not None:
        _config = core
    from sluice import metrics

    tracing.configure("sluice-server")
    candidate = Gateway(config(), on_beat=beat, on_command=_command, **metrics.hooks())
    await candidate.start()
    _gateway = candidate
    _started = True
    _usage = UsageCollector(config())
    _usage.start()
    lag.start()
    _freeze()
    _warm_up = asyncio.get_running_loop().create_task(_load_tokenizers(), name="load-tokenizers")


def _freeze() -> None:
    """What has been loaded lives as long as the process: collections need not walk it again.

    One engine step makes thousands of short-lived objects at once, which are gone again without
    any collection. With the usual thresholds it sets off several, and with many streams open
    they cost more than everything else that is done for a token.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    gc.collect()
    gc.freeze()


async def _load_tokenizers() -> None:
    """Load every model's tokenizer before the first request needs it; readiness waits for it."""
    for spec in config().model_specs():
        try:
            await tokenizer(spec.alias)
        except SluiceError as exc:
            _unloadable[spec.alias] = str(exc)
            logger.error("the tokenizer of %s cannot be loaded: %s", spec.alias, exc)
        else:
            _unloadable.pop(spec.alias, None)
    _freeze()


async def ensure_started() -> None:
    """Start lazily, under an ASGI server without lifespan. Failure shows in readiness and is tried again."""
    global _start_lock, _next_try
    if _started or server is not None or status.leaving or time.monotonic() < _next_try:
        return
    if _start_lock is None:
        _start_lock = asyncio.Lock()
    async with _start_lock:
        if _started or time.monotonic() < _next_try:
            return
        try:
            await start()
        except SluiceError as exc:
            logger.error("cannot start serving: %s", exc)
            _next_try = time.monotonic() + RETRY_START


async def stop(timeout: float) -> None:
    """Wait for the settler, then let go of Redis; bounded by ``timeout`` seconds."""
    global _gateway, _started, _start_lock, _text_pool, _usage, _warm_up
    lag.stop()
    warming, _warm_up = _warm_up, None
    if warming is not None:
        warming.cancel()
    candidate, _gateway, _started, _start_lock = _gateway, None, False, None
    usage, _usage = _usage, None
    if candidate is not None:
        from apps.accounts import limits

        await limits.stop(candidate)
        await candidate.stop(timeout)
        if usage is not None:
            await usage.stop()  # last, so that what the gateway has just ended is recorded too
        if tracing.active():
            await asyncio.to_thread(tracing.shutdown)
    _tokenizers.clear()
    pool, _text_pool = _text_pool, None
    if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)


async def offload(function: Callable[..., T], *args: Any) -> T:
    """Run ``function`` in one of the few text threads."""
    global _text_pool
    if _text_pool is None:
        _text_pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
    return await asyncio.get_running_loop().run_in_executor(_text_pool, function, *args)


async def tokenizer(alias: str) -> Any:
    """The tokenizer of a configured model; loaded once, in a thread.

    Raises:
        UnknownModel: no model of that alias is configured.
        inference.errors.ModelUnavailable: its files cannot be read.
    """
    future = _tokenizers.get(alias)
    if future is None:
        spec = next((s for s in config().model_specs() if s.alias == alias), None)
        if spec is None:
            raise UnknownModel(f"no model {alias!r} is configured")
        future = asyncio.ensure_future(offload(_load_tokenizer, spec))
        _tokenizers[alias] = future
    try:
        # Shielded: a client that goes must not cancel the load that others wait for.
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.cancelled():
            _tokenizers.pop(alias, None)
        raise
    except Exception:
        _tokenizers.pop(alias, None)  # the next caller tries again
        raise


def _load_tokenizer(spec: Any) -> Any:
    from inference.engine.factory import make_tokenizer

    return make_tokenizer(spec, config())


def unready_reasons() -> list[str]:
    """Why this server should get no traffic; empty when it should."""
    reasons = []
    if status.leaving:
        reasons.append(f"server is {status.state}")
    if not _started:
        return [*reasons, "gateway is not started"]
    served = _gateway.models()
    if not _gateway.healthy:
        reasons.append("redis does not answer")
    for alias in (s.alias for s in config().model_specs()):
        if alias not in served:
            reasons.append(f"no worker serves {alias}")
        if alias in _unloadable:
            reasons.append(f"the tokenizer of {alias} cannot be loaded")
    if _warm_up is not None and not _warm_up.done():
        reasons.append("tokenizers are loading")
    return reasons


@contextlib.contextmanager
def replaced(candidate: Any):
    """For tests: serve with ``candidate`` as the gateway."""
    global _gateway, _started
    before = (_gateway, _started)
    _gateway, _started = candidate, True
    try:
        yield candidate
    finally:
        _gateway, _started = before
