"""The OpenAPI 3.1 document, made from the same types that validate."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from apps.api import answers
from apps.api.schema.base import NoFields
from apps.api.schema.embeddings import EmbeddingBody
from apps.api.schema.generation import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody
from apps.api.schema.responses import ResponseBody
from inference.version import VERSION

REF = "#/components/schemas/{name}"

#: path -> method -> (tag, summary, body type, answer type, also a stream)
OPERATIONS: dict[str, dict[str, tuple[str, str, type | None, type, bool]]] = {
    "/v1/chat/completions": {"post": ("Generate", "Answer a conversation", ChatBody, answers.ChatCompletion, True)},
    "/v1/completions": {"post": ("Generate", "Continue a text", CompletionBody, answers.TextCompletion, True)},
    "/v1/responses": {"post": ("Generate", "Answer, in OpenAI's newer form", ResponseBody, answers.Response, True)},
    "/v1/responses/{response_id}": {
        "get": ("Generate", "A kept response", None, answers.Response, False),
        "delete": ("Generate", "Forget a kept response", None, answers.Deleted, False),
    },
    "/generate": {"post": ("Generate", "Continue a text, native form", GenerateBody, answers.Generated, True)},
    "/v1/embeddings": {"post": ("Embed", "Embed texts", EmbeddingBody, answers.Embeddings, False)},
    "/v1/models": {"get": ("Models", "What is served", None, answers.Models, False)},
    "/v1/models/{model}": {"get": ("Models", "One model", None, answers.Model, False)},
    "/tokenize": {"post": ("Models", "Text or conversation to token ids", TokenizeBody, answers.Tokens, False)},
    "/detokenize": {"post": ("Models", "Token ids to text", DetokenizeBody, answers.Text, False)},
    "/v1/requests/{request_id}": {
        "get": ("Requests", "A request in flight", None, answers.Request, False),
        "delete": ("Requests", "Cancel a request", None, answers.Request, False),
    },
    "/v1/requests/{request_id}/cancel": {"post": ("Requests", "Cancel a request", NoFields, answers.Request, False)},
    "/v1/requests/{request_id}/events": {
        "get": ("Requests", "Read on in a resumable request's stream", None, answers.Request, True)
    },
    "/v1/tickets": {
        "post": ("Requests", "A single-use ticket for a browser's WebSocket", NoFields, answers.Ticket, False)
    },
}

ERRORS = {
    "400": "The request is wrong; the error names the field.",
    "401": "No valid API key.",
    "403": "The key may not do this.",
    "404": "No such model or request.",
    "408": "The body did not arrive, or the request's timeout passed.",
    "409": "The request was cancelled.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too much is waiting; Retry-After says when to come back.",
    "500": "The engine failed.",
    "503": "The model is not served at the moment, or the server is shutting down; Retry-After says when to come back.",
}
EVENTS = 'data: {"id": "...", "one": "JSON object per event"}\n\ndata: [DONE]\n\n'
PARAMETERS = {
    "model": "Alias of a model.",
    "request_id": "As X-Sluice-Request and the answer's id tell it.",
    "response_id": "Id of a response.",
}


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The document."""
    kinds: set[type] = {answers.ErrorBody}
    for methods in OPERATIONS.values():
        for _, _, body, answer, _ in methods.values():
            kinds |= {answer} | ({body} if body is not None else set())
    order = sorted(kinds, key=lambda kind: kind.__name__)
    references, schemas = msgspec.json.schema_components(order, ref_template=REF)
    names = dict(zip(order, references, strict=True))
    return {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": "Sluice",
            "version": VERSION,
            "summary": "Language models over HTTP and WebSocket",
            "description": (
                "Speaks OpenAI's API. A parameter is supported or refused by name; none is accepted and ignored. "
                "Streams are server-sent events: data lines with JSON, then [DONE]. The WebSocket at /ws/v1/stream is "
                "described in /asyncapi.json."
            ),
        },
        "security": [{"key": []}],
        "tags": [{"name": name} for name in ("Generate", "Embed", "Models", "Requests")],
        "paths": {
            path: {method: _operation(path, method, *spec, names) for method, spec in methods.items()}
            for path, methods in OPERATIONS.items()
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas,
        },
    }


def _operation(
    path: str,
    method: str,
    tag: str,
    summary: str,
    body: type | None,
    answer: type,
    stream: bool,
    names: dict[type, Any],
) -> dict[str, Any]:
    good: dict[str, Any] = {"application/json": {"schema": names[answer]}}
    if path.endswith("/events"):
        good = {}
    if stream:
        # OpenAPI 3.1 has no schema for events: a stream is described by an example, and in docs/api.md.
        good["text/event-stream"] = {"example": EVENTS}
    out: dict[str, Any] = {
        "tags": [tag],
        "summary": summary,
        "operationId": f"{method}_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {
            "200": {"description": "Done.", "content": good},
            **{
                status: {"description": text, "content": {"application/json": {"schema": names[answers.ErrorBody]}}}
                for status, text in ERRORS.items()
            },
        },
    }
    if body is not None:
        content = {"application/json": {"schema": names[body]}}
        out["requestBody"] = {"required": body is not NoFields, "content": content}
    parameters = [
        {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
        for name, text in PARAMETERS.items()
        if f"{{{name}}}" in path
    ]
    if path.endswith("/events"):
        for name, place in (("Last-Event-ID", "header"), ("after", "query")):
            parameters.append(
                {
                    "name": name,
                    "in": place,
                    "required": False,
                    "description": "Number of the last event that has been seen.",
                    "schema": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
                }
            )
    if parameters:
        out["parameters"] = parameters
    return out
