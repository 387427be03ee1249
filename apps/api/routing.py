"""The routes of the API, for the server's route table."""

from __future__ import annotations

from sluice.routes import Route

_REQUEST = "v1/requests/<str:request_id>"

http_routes = [
    Route("v1/chat/completions", "apps.api.generate.ChatConsumer", ("POST",), inference=True),
    Route("v1/completions", "apps.api.generate.CompletionConsumer", ("POST",), inference=True),
    Route("v1/responses", "apps.api.responses.ResponsesConsumer", ("POST",), inference=True),
    Route("v1/responses/<str:response_id>", "apps.api.responses.ResponseConsumer", ("GET", "DELETE")),
    Route("v1/embeddings", "apps.api.embeddings.EmbeddingsConsumer", ("POST",), inference=True),
    Route("generate", "apps.api.generate.GenerateConsumer", ("POST",), inference=True),
    Route("v1/models", "apps.api.catalog.ModelsConsumer"),
    Route("v1/models/<str:model>", "apps.api.catalog.ModelConsumer"),
    Route("tokenize", "apps.api.catalog.TokenizeConsumer", ("POST",)),
    Route("detokenize", "apps.api.catalog.DetokenizeConsumer", ("POST",)),
    Route("openapi.json", "apps.api.documents.OpenApiConsumer", access="public"),
    Route("asyncapi.json", "apps.api.documents.AsyncApiConsumer", access="public"),
    Route("docs", "apps.api.documents.DocsConsumer", access="public"),
    Route("v1/tickets", "apps.api.catalog.TicketConsumer", ("POST",)),
    Route(_REQUEST, "apps.api.requests.RequestConsumer", ("GET", "DELETE")),
    Route(f"{_REQUEST}/cancel", "apps.api.requests.CancelConsumer", ("POST",)),
    Route(f"{_REQUEST}/events", "apps.api.requests.EventsConsumer"),
]
websocket_routes = [
    Route("ws/v1/stream", "apps.api.websocket.StreamConsumer", kind="websocket", inference=True),
]
