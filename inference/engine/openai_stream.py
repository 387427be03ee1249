"""What an OpenAI-compatible upstream is sent, and what it streams, as outputs of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from inference.engine.base import EngineOutput
from inference.errors import UpstreamError
from inference.messages import Grammar, SamplingParams

_MAX_EVENT = 4 << 20  # bytes of one event; beyond it the upstream talks nonsense


# Off where they have their default; upstreams other than OpenAI's own know most of the last ones.
_OPTIONAL = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
)
_DEFAULTS = SamplingParams(max_tokens=1)


def set_parameters(body: dict[str, Any], params: SamplingParams, *, limited: bool) -> None:
    """Write ``params`` into a request body, in place of what the body says of them.

    Args:
        limited: ``max_tokens`` is a real limit; otherwise it stands for "what is left of the
            context", which the upstream knows better, and is sent only where the body names one.

    Raises:
        UpstreamError: the protocol has no word for the grammar.
    """
    body.pop("n", None)
    named = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if limited or named in body:
        body.pop("max_tokens", None)
        body[named] = params.max_tokens
    body["temperature"] = params.temperature
    body["top_p"] = params.top_p
    if body.get("seed") is not None and params.seed is not None:
        body["seed"] = params.seed  # each choice of a request has its own
    for name in _OPTIONAL:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            body[name] = {str(k): v for k, v in value.items()} if name == "logit_bias" else value
        else:
            body.pop(name, None)
    if params.grammar is not None and "response_format" not in body:
        body["response_format"] = _response_format(params.grammar)


def _response_format(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"type": "json_object"}
    if grammar.kind == "json_schema":
        schema = msgspec.json.decode(grammar.spec)
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    raise UpstreamError(f"This model's server can not be asked for an answer by {grammar.kind}.")


class Answer:
    """Turns the upstream's chunks into outputs."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._finish: str | None = None
        self._count = 0
        self._usage: int | None = None
        self._cached = 0
        self._calls: dict[int, dict[str, str]] = {}

    def take(self, event: bytes) -> EngineOutput | None:
        """The output of one event, if it holds text.

        Raises:
            UpstreamError: the event is an error or no chunk.
        """
        try:
            chunk = msgspec.json.decode(event, type=dict[str, Any])
            if chunk.get("error"):
                raise UpstreamError("The upstream server failed while answering.")
            usage = chunk.get("usage")
            if usage:
                self._usage = int(usage["completion_tokens"])
                self._cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            choices = chunk.get("choices")
            if not choices:
                return None
            choice = choices[0]
            delta = choice.get("delta") or {}
            text = delta.get("content") if "delta" in choice else choice.get("text")
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
            self._finish = choice.get("finish_reason") or self._finish
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError):
            raise UpstreamError("The upstream server answered something that is no answer.") from None
        if not isinstance(text, str) or not text:
            return None
        self._count += 1
        return EngineOutput(self._id, [0], text=text)

    def _add_call(self, call: Mapping[str, Any]) -> None:
        kept = self._calls.setdefault(call.get("index") or 0, {"name": "", "arguments": ""})
        function = call.get("function") or {}
        kept["name"] += function.get("name") or ""
        kept["arguments"] += function.get("arguments") or ""

    def end(self) -> EngineOutput:
        """The last output.

        Raises:
            UpstreamError: the stream broke off before a finish reason.
        """
        if self._finish is None:
            raise UpstreamError("The upstream server broke off the answer.")
        text = "".join(
            f'<tool_call>\n{{"name": {_quote(call["name"])}, "arguments": {call["arguments"] or "{}"}}}\n</tool_call>\n'
            for _, call in sorted(self._calls.items())
        )
        finish = "length" if self._finish == "length" else "stop"
        missing = max(0, (self._usage or 0) - self._count)
        return EngineOutput(self._id, [0] * missing, text=text, finish=finish, cached=self._cached)


def _quote(text: str) -> str:
    return msgspec.json.encode(text).decode()


def refusal(response: httpx.Response) -> str:
    """A sentence without anything that the upstream may quote from the prompt."""
    status = response.status_code
    if status in (401, 403):
        return "The upstream server refuses our key."
    if status == 429:
        return "The upstream server is overloaded."
    kind = None
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        error = response.json()["error"]
        kind = error.get("code") or error.get("type")
    named = f" ({kind})" if isinstance(kind, str) and kind.isidentifier() and len(kind) < 50 else ""
    return f"The upstream server answered {status}{named}."


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event.

    Split by bytes: line iterators over text also split at U+2028 and its like, which may
    stand inside JSON strings.
    """
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MAX_EVENT:
            raise UpstreamError("The upstream server answered something that is no answer.")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def merged(outputs: list[EngineOutput]) -> list[EngineOutput]:
    """One output per sequence: several chunks may have come in one turn of the loop."""
    by_id: dict[str, EngineOutput] = {}
    for output in outputs:
        earlier = by_id.get(output.id)
        if earlier is not None:
            ids, text = earlier.ids + output.ids, (earlier.text or "") + (output.text or "")
            output = msgspec.structs.replace(output, ids=ids, text=text)
        by_id[output.id] = output
    return list(by_id.values())
