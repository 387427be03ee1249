"""``/openapi.json``, ``/asyncapi.json`` and a page to read them on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from django.template.loader import render_to_string

from apps.api import asyncapi, openapi, reference
from apps.api.http import ApiConsumer
from apps.api.schema.generation import Sampling

_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_CACHE = [(b"cache-control", b"public, max-age=300")]


class OpenApiConsumer(ApiConsumer):
    """``GET /openapi.json``."""

    async def get(self, body: bytes) -> None:
        await self.send_json(200, openapi.document(), _CACHE)


class AsyncApiConsumer(ApiConsumer):
    """``GET /asyncapi.json``."""

    async def get(self, body: bytes) -> None:
        await self.send_json(200, asyncapi.document(), _CACHE)


class DocsConsumer(ApiConsumer):
    """``GET /docs``: endpoints and parameters, without any script."""

    async def get(self, body: bytes) -> None:
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", _POLICY),
            (b"x-content-type-options", b"nosniff"),
        ]
        await self.send_bytes(200, page(), [*headers, *_CACHE])


@lru_cache(maxsize=1)
def page() -> bytes:
    """The page; it takes a while to make, and anybody may ask for it."""
    document = openapi.document()
    operations: list[dict[str, Any]] = [
        {"method": method.upper(), "path": path, "summary": spec["summary"]}
        for path, methods in document["paths"].items()
        for method, spec in methods.items()
    ]
    sections = [("Shared by all that generate", reference.rows(Sampling))]
    sections += [
        (title, reference.rows(kind, common=not issubclass(kind, Sampling))) for title, kind in reference.BODIES
    ]
    messages = [
        (name, msgspec.json.format(msgspec.json.encode(example), indent=2).decode())
        for name, example in asyncapi.EXAMPLES.items()
    ]
    context = {
        "info": document["info"],
        "operations": operations,
        "sections": [(title, entries) for title, entries in sections if entries],
        "messages": messages,
        "errors": openapi.ERRORS.items(),
    }
    return str(render_to_string("api/docs.html", context)).encode()
