"""The routes of the API, for the server's route table."""

from __future__ import annotations

from sluice.routes import Route

http_routes = [
    Route("v1/chat/completions", "apps.api.generate.ChatConsumer", ("POST",), inference=True),
    Route("v1/completions", "apps.api.generate.CompletionConsumer", ("POST",), inference=True),
    Route("generate", "apps.api.generate.GenerateConsumer", ("POST",), inference=True),
]
websocket_routes: list[Route] = []
