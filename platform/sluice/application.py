"""Puts the ASGI application together, outermost layer first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.errors import SluiceError
from sluice import runtime
from sluice.exchanges import ExchangeMiddleware
from sluice.routes import Route, all_routes
from sluice.routing import Labels, build_router
from sluice.static import StaticFiles


class Started:
    """Has the process's gateway running before the first exchange that needs it, and answers lifespan.

    ``manage.py serve`` has started it by then. Other ASGI servers get it from their
    lifespan protocol, or, where they speak none, with the first exchange.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["path"] != "/livez":  # which answers whatever else does not
            await runtime.ensure_started()
        await self.app(scope, receive, send)


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            try:
                await runtime.start()
            except SluiceError as exc:
                await send({"type": "lifespan.startup.failed", "message": str(exc)})
                return
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await runtime.stop(10.0)
            await send({"type": "lifespan.shutdown.complete"})
            return


def build_application(django_app: Any, routes: Sequence[Route] | None = None) -> Any:
    """Exchange count, then start-up, then routing; of the whole route table unless ``routes`` are given."""
    routes = all_routes() if routes is None else routes
    app = Started(build_router(django_app, StaticFiles(), routes))
    return ExchangeMiddleware(app, runtime.exchanges, Labels(routes))
