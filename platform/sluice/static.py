"""Static files as an ASGI application, straight from the apps' ``static`` folders.

WhiteNoise does the work that matters (types, ETags, ranges, compressed variants);
its Django middleware is synchronous and would put a thread under every page, so
only its files are used. No ``collectstatic`` is needed.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any
from wsgiref.headers import Headers

from django.conf import settings
from django.contrib.staticfiles.finders import find, get_finders
from whitenoise import WhiteNoise
from whitenoise.responders import MissingFileError

CHUNK = 256 * 1024


def _extra_headers(headers: Headers, path: str, url: str) -> None:
    headers["X-Content-Type-Options"] = "nosniff"


class StaticFiles:
    """Serves everything under ``STATIC_URL``; 404 for what no finder knows."""

    def __init__(self) -> None:
        self.prefix = settings.STATIC_URL
        self._noise = WhiteNoise(
            None,
            max_age=0 if settings.DEBUG else 300,
            allow_all_origins=False,
            add_headers_function=_extra_headers,
        )
        if not settings.DEBUG:
            for finder in get_finders():
                for path, storage in finder.list([]):
                    name = f"{storage.prefix}/{path}" if getattr(storage, "prefix", None) else path
                    url = self.prefix + name
                    # The first finder wins, as everywhere in Django.
                    if url not in self._noise.files:
                        self._noise.add_file_to_dictionary(url, storage.path(path))

    def _lookup(self, url: str) -> Any:
        if not settings.DEBUG:
            return self._noise.files.get(url)
        path = find(url[len(self.prefix) :])
        try:
            return self._noise.get_static_file(path, url) if path else None
        except MissingFileError:
            return None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        file = self._lookup(scope["path"])
        if file is None:
            await _reply(send, HTTPStatus.NOT_FOUND, [("Content-Type", "text/plain")], b"Not found\n")
            return
        env = {
            "HTTP_" + k.decode("latin-1").upper().replace("-", "_"): v.decode("latin-1") for k, v in scope["headers"]
        }
        response = await asyncio.to_thread(file.get_response, scope["method"], env)
        try:
            body = b""
            if response.file is not None:
                body = await asyncio.to_thread(response.file.read, CHUNK)
            await _start(send, response.status, response.headers)
            while body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b"" if len(body) < CHUNK else await asyncio.to_thread(response.file.read, CHUNK)
            await send({"type": "http.response.body", "body": b""})
        finally:
            if response.file is not None:
                response.file.close()


async def _start(send: Any, status: int, headers: Any) -> None:
    encoded = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers]
    await send({"type": "http.response.start", "status": int(status), "headers": encoded})


async def _reply(send: Any, status: int, headers: Any, body: bytes) -> None:
    await _start(send, status, [*headers, ("Content-Length", str(len(body)))])
    await send({"type": "http.response.body", "body": body})
