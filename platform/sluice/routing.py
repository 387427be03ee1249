"""From a scope to the application that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings
from django.urls import Resolver404, path, re_path, resolve

from sluice.consumers.errors import error_body
from sluice.routes import Route, RouteMatcher, is_canonical


def _with_route(route: Route, app: Any) -> Any:
    async def routed(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "sluice.route": route}, receive, send)

    return routed


async def not_found(scope: Any, receive: Any, send: Any) -> None:
    """404 as JSON, also as the answer to a WebSocket's handshake where the server can say it."""
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()
        kind = "websocket.http.response"
        if kind not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 4404})
            return
    body = error_body(f"There is nothing at {scope['path'][:100]!r}.", code="not_found")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.start", "status": 404, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


class CanonicalPaths:
    """Lets through only paths with one spelling, so that no rule can be walked round."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self.app if is_canonical(scope["path"], scope.get("raw_path")) else not_found
        await app(scope, receive, send)


class JsonNotFound:
    """Django's pages, except where a path lies beside the API: its clients expect errors as JSON."""

    def __init__(self, app: Any, routes: Sequence[Route]) -> None:
        self.app = app
        self._first = {route.path.partition("/")[0] for route in routes}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        first = scope["path"].split("/", 2)[1].lower()
        await (not_found if first in self._first else self.app)(scope, receive, send)


def build_router(django_app: Any, static_app: Any, routes: Sequence[Route]) -> Any:
    """The router of both protocols: the routes first, then static files, then Django."""
    http, websocket = [], []
    for route in routes:
        target = http if route.kind == "http" else websocket
        target.append(path(route.path, _with_route(route, route.application())))
    http.append(re_path("^" + settings.STATIC_URL.lstrip("/"), static_app))
    http.append(re_path("", JsonNotFound(django_app, routes)))
    websocket.append(re_path("", not_found))
    return ProtocolTypeRouter(
        {"http": CanonicalPaths(URLRouter(http)), "websocket": CanonicalPaths(URLRouter(websocket))}
    )


class Labels:
    """The route template of a scope, out of a closed set: what counts and metrics are kept by."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._matcher = RouteMatcher(routes)

    def __call__(self, scope: Any) -> str:
        path = scope["path"]
        if not is_canonical(path, scope.get("raw_path")):
            return "unmatched"
        if found := self._matcher.match(scope["type"], path):
            return found[0].template
        if scope["type"] == "websocket":
            return "unmatched"
        if path.startswith(settings.STATIC_URL):
            return "static"
        try:
            return "/" + resolve(path).route
        except Resolver404:
            return "unmatched"
