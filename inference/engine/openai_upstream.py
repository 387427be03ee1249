"""Any OpenAI-compatible server as an engine: the way past one machine's GPUs.

Target: ``alias=openai:http://host:8000/v1#name-there``; without ``#name`` the upstream
is asked for the alias. A key for it is read from ``SLUICE_UPSTREAM_KEY``.

What the upstream does not tell is made up or left out: token ids are zeros, one
per chunk of text and as many in the end as the upstream's usage says; log
probabilities and reasoning texts are not passed on; a tool call comes out as
text, ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, which is how local
models write it. Such an answer can not be continued by another worker: what has sent
text when its worker dies fails, what has not starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from inference.config import Config
from inference.engine.base import Died, EngineOutput, Sink
from inference.engine.openai_stream import Answer, events, merged, refusal, set_parameters
from inference.engine.openai_tokenizer import UNKNOWN_CONTEXT
from inference.errors import (
    ConfigError,
    EngineDied,
    ModelUnavailable,
    Overloaded,
    TooLarge,
    UpstreamError,
)
from inference.messages import EngineStats, Job, ModelInfo

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT = 10.0
_CONTEXT_KEYS = ("max_model_len", "context_length", "context_window", "n_ctx", "n_ctx_train")


class OpenAIEngine:
    """See the module; the contract is :class:`inference.engine.base.Engine`.

    Raises:
        ConfigError: the target is no http(s) URL.
    """

    def __init__(self, target: str, *, alias: str, config: Config) -> None:
        url, _, name = target.partition("#")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError(f"SLUICE_MODELS: the target of {alias!r} must be like http://host:8000/v1#name")
        self._url = url.rstrip("/")
        self._name = name or alias
        self._alias = alias
        self._slots = config.max_running
        self._config_context = config.context_length
        self._context = 0
        self._read_timeout = config.stall_timeout
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._pending: list[EngineOutput] = []
        self._flush_due: asyncio.Handle | None = None
        self._client: httpx.AsyncClient | None = None
        self._sink: Sink | None = None
        self._steps = 0
        self._prompt_tokens = 0
        self._generated = 0

    async def load(self, sink: Sink, died: Died) -> ModelInfo:
        """Ask the upstream for its models; ``died`` is never called, a failing upstream fails requests."""
        self._sink = sink
        key = os.environ.get("SLUICE_UPSTREAM_KEY", "")
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._read_timeout, connect=_CONNECT_TIMEOUT, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._slots),
        )
        try:
            told = await self._ask_context()
        except BaseException:  # also a cancellation: an engine that was not loaded keeps nothing open
            await self.close()
            raise
        self._context = self._config_context or told
        context = self._context or UNKNOWN_CONTEXT
        return ModelInfo(
            alias=self._alias,
            engine="openai",
            context_length=context,
            capacity_tokens=context,
            slots=self._slots,
        )

    async def _ask_context(self) -> int:
        """The context length that the upstream names for the model; 0 where it names none."""
        assert self._client is not None
        try:
            response = await self._client.get(f"{self._url}/models", timeout=_CONNECT_TIMEOUT)
        except httpx.HTTPError as error:
            raise ModelUnavailable(
                f"model {self._alias!r}: the upstream server can not be reached ({type(error).__name__})"
            ) from error
        if response.status_code in (401, 403):
            raise ModelUnavailable(f"model {self._alias!r}: the upstream server refuses the key in SLUICE_UPSTREAM_KEY")
        if response.status_code >= 500:
            raise ModelUnavailable(f"model {self._alias!r}: the upstream server answered {response.status_code}")
        try:
            models = response.json()["data"]
            entry = next((each for each in models if each.get("id") == self._name), None)
        except (ValueError, LookupError, TypeError, AttributeError):
            return 0  # not every server lists its models
        if entry is None:
            if models:
                log.warning("The upstream of model %s does not list the configured name.", self._alias)
            return 0
        details = {**(entry.get("meta") or {}), **entry}
        return next((n for key in _CONTEXT_KEYS if isinstance(n := details.get(key), int)), 0)

    def submit(self, job: Job, resumed: Sequence[int] = ()) -> None:
        """See the contract. The size of a prompt is the upstream's to judge, only an
        answer longer than the whole context is refused here.
        """
        if self._client is None:
            raise EngineDied("The engine has stopped.")
        if self._context and job.params.max_tokens > self._context:
            raise TooLarge(f"The answer may have {job.params.max_tokens} tokens; the model holds {self._context}.")
        if len(self._tasks) >= self._slots:
            raise Overloaded("No slot is free.")
        self._prompt_tokens += len(job.prompt_ids)
        task = asyncio.get_running_loop().create_task(self._run(job, bool(resumed)), name=f"upstream-{job.id}")
        self._tasks[job.id] = task

    def abort(self, request_id: str) -> None:
        # Also of a sequence that has finished, whose last output has not gone out yet.
        self._pending = [output for output in self._pending if output.id != request_id]
        task = self._tasks.pop(request_id, None)
        if task is not None:
            # Cancelling closes the connection, by which the upstream knows; kept until it has.
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            task.cancel()

    def free_slots(self) -> int:
        return 0 if self._client is None else self._slots - len(self._tasks)

    def fits(self, job: Job, resumed: int = 0) -> bool:
        return self.free_slots() > 0 and not (self._context and job.params.max_tokens > self._context)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._tasks),
            slots=self._slots,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
        )

    async def close(self) -> None:
        for request_id in list(self._tasks):
            self.abort(request_id)
        if self._closing:
            await asyncio.wait(set(self._closing))
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # One request

    async def _run(self, job: Job, resumed: bool) -> None:
        """Forward one request; whatever happens, its last output carries a finish."""
        try:
            if resumed:
                raise UpstreamError("The connection to the model was lost, and this model can not continue.")
            finish = await self._forward(job)
            self._emit(finish)
        except UpstreamError as error:
            self._emit(EngineOutput(job.id, [], text="", finish="error", error=str(error)))
        except httpx.TimeoutException:
            self._fail(job, "The upstream server did not answer in time.")
        except httpx.ConnectError:
            self._fail(job, "The upstream server can not be reached.")
        except httpx.HTTPError:
            self._fail(job, "The connection to the upstream server broke.")
        except Exception:  # a task's edge: the request must end in any case
            log.exception("Forwarding a request failed", extra={"request_id": job.id})
            self._fail(job, "The request could not be forwarded.")

    def _fail(self, job: Job, sentence: str) -> None:
        self._emit(EngineOutput(job.id, [], text="", finish="error", error=sentence))

    async def _forward(self, job: Job) -> EngineOutput:
        """Stream one answer; return its last output.

        Raises:
            UpstreamError: the upstream refused, or answered what is no answer.
        """
        assert self._client is not None
        path, body = self._body(job)
        answer = Answer(job.id)
        async with self._client.stream("POST", f"{self._url}{path}", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise UpstreamError(refusal(response))
            async for event in events(response):
                if event == b"[DONE]":
                    break
                output = answer.take(event)
                if output is not None:
                    self._emit(output)
        return answer.end()

    def _body(self, job: Job) -> tuple[str, dict[str, Any]]:
        """Where to post, and what: the prompt as the client gave it, the parameters as we understood them."""
        try:
            body = msgspec.json.decode(job.prompt_text or "", type=dict[str, Any])
        except msgspec.DecodeError:
            raise UpstreamError("The request holds nothing that could be forwarded.") from None
        limited = job.params.max_tokens < (self._context or UNKNOWN_CONTEXT) // 2
        set_parameters(body, job.params, limited=limited)
        body.update(model=self._name, stream=True, stream_options={"include_usage": True})
        return ("/chat/completions" if "messages" in body else "/completions"), body

    def _emit(self, output: EngineOutput) -> None:
        """Add to this turn's step; all that comes in one turn of the loop goes out together."""
        if self._tasks.get(output.id) is not asyncio.current_task():
            return  # aborted while on its way
        self._generated += len(output.ids)
        self._pending.append(output)
        if output.finish is not None:
            del self._tasks[output.id]
        if self._flush_due is None:
            self._flush_due = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = None
        outputs, self._pending = self._pending, []
        if outputs and self._sink is not None:
            self._steps += 1
            self._sink(merged(outputs))
