"""``/v1/responses``: asked like a conversation, kept for a while, continued by id."""

from __future__ import annotations

from typing import Any

import msgspec
from channels.db import database_sync_to_async
from django.db import DatabaseError

from apps.accounts.principal import Principal
from apps.api import deps, models, plan
from apps.api.errors import ApiError, invalid
from apps.api.http import ApiConsumer
from apps.api.render.base import Renderer, error_event
from apps.api.render.responses import ResponseRenderer
from apps.api.schema.base import Decoder, explain
from apps.api.schema.generation import ChatBody, Sampling
from apps.api.schema.responses import (
    FlatChoice,
    InputCall,
    InputItem,
    InputMessage,
    InputResult,
    ResponseBody,
    SchemaText,
    TextOptions,
)

decode_response = Decoder(ResponseBody)

_SAME = [name for name in Sampling.__struct_fields__ if name not in ("max_tokens", "resumable")]


class ResponsesConsumer(ApiConsumer):
    """``POST /v1/responses``."""

    async def post(self, body: bytes) -> None:
        self.need("generate")
        asked = decode_response(body)
        if asked.stream_options is not None:
            if not asked.stream:
                raise invalid("stream_options needs stream: true.", "stream_options", "invalid_value")
            plan.check_obfuscation(asked.stream_options.include_obfuscation)
        fresh = messages_of(asked.input)
        self._conversation = [*await self._earlier(asked), *fresh]
        made = await planned(asked, self._conversation, self.caller)
        self._asked = asked
        echo = echo_of(asked)
        self._renderer: ResponseRenderer | None = None

        def make(generation: Any) -> ResponseRenderer:
            self._renderer = ResponseRenderer(generation, echo)
            return self._renderer

        await self.serve(made, make)

    def error_events(self, exc: ApiError) -> bytes:
        return self._renderer.failed(exc) if self._renderer is not None else error_event(exc)

    async def before_end(self, renderer: Renderer) -> None:
        """Keep the response before its end is told, so that it can be continued at once."""
        if self._asked.store is False:
            return
        response = renderer.body()
        conversation = [*self._conversation, *messages_of([dict(item) for item in response["output"]])]
        seconds = deps.config().log_retention
        try:
            await database_sync_to_async(models.keep)(
                response["id"], self.caller.owner, conversation, response, seconds
            )
        except DatabaseError as exc:
            raise ApiError(503, "The response could not be kept.", code="unavailable", retry_after=2.0) from exc

    async def _earlier(self, asked: ResponseBody) -> list[dict[str, Any]]:
        if asked.previous_response_id is None:
            return []
        kept = await find(asked.previous_response_id, self, "previous_response_id")
        return kept.messages()


class ResponseConsumer(ApiConsumer):
    """``GET`` and ``DELETE /v1/responses/{id}``."""

    async def get(self, body: bytes) -> None:
        self.need("read")
        self._check_query()
        kept = await find(self.kwargs["response_id"], self, "response_id")
        await self.send_json(200, kept.body())

    async def delete(self, body: bytes) -> None:
        self.need("generate")
        kept = await find(self.kwargs["response_id"], self, "response_id")
        await database_sync_to_async(models.forget)(kept.pk)
        await self.send_json(200, {"id": kept.pk, "object": "response", "deleted": True})

    def _check_query(self) -> None:
        """Refuse to stream what is kept, and whatever else could be asked of it."""
        for name, values in self.query.items():
            if name in ("stream", "include_obfuscation") and values == ["false"]:
                continue
            raise invalid(f"A kept response is told whole: {name!r} is not supported.", name, "unsupported_parameter")


async def find(response_id: str, consumer: ApiConsumer, param: str) -> models.KeptResponse:
    """A kept response of this caller.

    Raises:
        ApiError: 404; 503 where the database does not answer.
    """
    try:
        kept: models.KeptResponse | None = await database_sync_to_async(models.find)(response_id)
    except DatabaseError as exc:
        raise ApiError(503, "Kept responses can not be read.", code="unavailable", retry_after=2.0) from exc
    if kept is None or not consumer.caller.owns(kept.owner):
        raise ApiError(404, "No response of this id is kept.", param=param, code="response_not_found")
    return kept


async def planned(asked: ResponseBody, conversation: list[dict[str, Any]], caller: Principal) -> plan.Plan:
    """The plan of a response to ``conversation``.

    Raises:
        ApiError: as :func:`apps.api.plan.chat`, in this endpoint's words.
    """
    try:
        return await plan.chat(
            as_chat(asked, conversation),
            caller,
            endpoint="responses",
            request_id=plan.new_id("resp").replace("-", "_"),
            asked_as="max_output_tokens",
            prompt_as="input",
        )
    except ApiError as exc:
        raise in_own_words(exc) from None


def as_chat(asked: ResponseBody, conversation: list[dict[str, Any]]) -> ChatBody:
    """The same question in the older form.

    Raises:
        ApiError: 400.
    """
    messages = list(conversation)
    if asked.instructions is not None:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    raw: dict[str, Any] = {name: getattr(asked, name) for name in _SAME}
    raw |= {
        "model": asked.model,
        "messages": messages,
        "max_completion_tokens": asked.max_output_tokens,
        "stream": asked.stream,
        # Clients send it always here; the older form takes it beside tools only.
        "parallel_tool_calls": asked.parallel_tool_calls if asked.tools else None,
        "chat_template_kwargs": asked.chat_template_kwargs,
        "response_format": _format(asked.text),
    }
    if asked.tools is not None:
        raw["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                },
            }
            for tool in asked.tools
        ]
    choice = asked.tool_choice
    if isinstance(choice, FlatChoice):
        raw["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        raw["tool_choice"] = choice
    try:
        return msgspec.convert(raw, ChatBody)
    except msgspec.ValidationError as exc:
        raise explain(str(exc)) from None


def in_own_words(error: ApiError) -> ApiError:
    """An error about the older form, naming what this endpoint calls it."""
    param = error.param or ""
    if param.startswith("messages"):
        error.param = "input"
    elif param.startswith("response_format"):
        error.param = "text.format"
    elif param.startswith("tools["):
        error.param = param.replace(".function", "", 1)
    return error


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    wanted = text.format if text is not None else None
    if wanted is None:
        return None
    if isinstance(wanted, SchemaText):
        schema = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": str(wanted.__struct_config__.tag)}


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as chat messages; consecutive calls belong to one answer.

    Raises:
        ApiError: 400 that names the item.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    out: list[dict[str, Any]] = []
    for at, raw in enumerate(given):
        try:
            kind = raw.get("type")
            item: InputItem = msgspec.convert({**raw, "type": "message" if kind is None else kind}, InputItem)
        except msgspec.ValidationError as exc:
            raise explain(str(exc), f"input[{at}]") from None
        _append(out, item)
    return out


def _append(out: list[dict[str, Any]], item: InputItem) -> None:
    if isinstance(item, InputMessage):
        out.append({"role": item.role, "content": _joined(item.content)})
    elif isinstance(item, InputResult):
        out.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
    elif isinstance(item, InputCall):
        call = {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        out[-1].setdefault("tool_calls", []).append(call)


def _joined(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def echo_of(asked: ResponseBody) -> dict[str, Any]:
    """The request's parameters, as the response object repeats them."""
    text = msgspec.to_builtins(asked.text) if asked.text is not None else {}
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "store": asked.store is not False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": msgspec.to_builtins(asked.tool_choice) or "auto",
        "tools": msgspec.to_builtins(asked.tools or []),
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
    }
