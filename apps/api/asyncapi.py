"""The AsyncAPI 3 document of ``/ws/v1/stream``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import msgspec

from apps.api.answers import Answer, ErrorObject, Timings, Usage
from apps.api.schema.socket import SocketAttach, SocketCancel, SocketGenerate, SocketPing
from inference.version import VERSION


class Accepted(Answer, tag_field="type", tag="accepted"):
    """The generation has been accepted; ``request_id`` names it to ``/v1/requests`` and ``attach``."""

    id: str
    request_id: str
    model: str


class Queued(Answer, tag_field="type", tag="queued"):
    """It waits; position 0 is next. Repeated now and then while it does."""

    id: str
    position: int
    estimate_s: float


class TextDelta(Answer, tag_field="type", tag="delta"):
    """Text that became certain. ``seq`` grows, with gaps."""

    id: str
    seq: int
    text: str


class Done(Answer, tag_field="type", tag="done"):
    """The last message of a generation."""

    id: str
    finish_reason: Literal["stop", "length", "cancelled"]
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class Failed(Answer, tag_field="type", tag="error"):
    """With an id: that generation is over (except for duplicate_id). Without: a message could not be read."""

    id: str | None
    error: ErrorObject
    status: int
    retry_after: float | msgspec.UnsetType = msgspec.UNSET


class Pong(Answer, tag_field="type", tag="pong"):
    """The answer to a ping."""

    id: str | None


SENT: dict[str, type] = {
    "generate": SocketGenerate,
    "cancel": SocketCancel,
    "attach": SocketAttach,
    "ping": SocketPing,
}
RECEIVED: dict[str, type] = {
    "accepted": Accepted,
    "queued": Queued,
    "delta": TextDelta,
    "done": Done,
    "error": Failed,
    "pong": Pong,
}

EXAMPLES: dict[str, dict[str, Any]] = {
    "generate": {"type": "generate", "id": "a", "model": "demo", "prompt": "Once upon a time", "max_tokens": 64},
    "cancel": {"type": "cancel", "id": "a"},
    "attach": {"type": "attach", "id": "b", "request_id": "gen-0123456789abcdef01234567", "after": 12},
    "ping": {"type": "ping", "id": "p"},
    "accepted": {"type": "accepted", "id": "a", "request_id": "gen-0123456789abcdef01234567", "model": "demo"},
    "queued": {"type": "queued", "id": "a", "position": 2, "estimate_s": 1.5},
    "delta": {"type": "delta", "id": "a", "seq": 1, "text": " there"},
    "done": {
        "type": "done",
        "id": "a",
        "finish_reason": "length",
        "stop_reason": None,
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 64,
            "total_tokens": 68,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "timings": {"total_ms": 912.4, "ttft_ms": 41.0},
    },
    "error": {
        "type": "error",
        "id": "a",
        "error": {
            "message": "The model 'x' does not exist or you do not have access to it.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        },
        "status": 404,
    },
    "pong": {"type": "pong", "id": "p"},
}

CLOSE_CODES = {
    1000: "The client closed.",
    1009: "A message was too big.",
    1012: "The server restarts: connect again, and attach to what was resumable.",
    4400: "The subprotocol is not sluice.v1 (the handshake gets 400).",
    4401: "No valid key, session or ticket (the handshake gets 401), or the key was revoked meanwhile.",
    4403: "The origin or the key may not connect (the handshake gets 403).",
    4408: "Nothing was said and nothing ran for too long.",
    4429: "Too many messages.",
}


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The document."""
    kinds = {**SENT, **RECEIVED}
    references, schemas = msgspec.json.schema_components(
        list(kinds.values()), ref_template="#/components/schemas/{name}"
    )
    messages = {
        name: {
            "name": name,
            "contentType": "application/json",
            "payload": reference,
            "examples": [{"payload": EXAMPLES[name]}],
        }
        for name, reference in zip(kinds, references, strict=True)
    }
    channel = {"$ref": "#/channels/stream"}

    def refs(names: dict[str, type]) -> list[dict[str, str]]:
        return [{"$ref": f"#/channels/stream/messages/{name}"} for name in names]

    codes = " ".join(f"{code}: {text}" for code, text in CLOSE_CODES.items())
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Sluice WebSocket",
            "version": VERSION,
            "description": (
                "Subprotocol sluice.v1, JSON text messages. Several generations may run on one socket; every message "
                "of one carries the id that its generate or attach gave. Close codes. " + codes
            ),
        },
        "defaultContentType": "application/json",
        "channels": {
            "stream": {
                "address": "/ws/v1/stream",
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in kinds},
                "bindings": {"ws": {"method": "GET", "bindingVersion": "0.1.0"}},
            }
        },
        "operations": {
            "ask": {"action": "receive", "channel": channel, "summary": "What clients send.", "messages": refs(SENT)},
            "answer": {
                "action": "send",
                "channel": channel,
                "summary": "What the server sends.",
                "messages": refs(RECEIVED),
            },
        },
        "components": {
            "messages": messages,
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
