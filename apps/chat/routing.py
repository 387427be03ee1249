"""The chat's part of the route table."""

from sluice.routes import Route

websocket_routes = [
    Route("ws/chat", "apps.chat.consumers.ChatConsumer", access="session", kind="websocket", inference=True),
]
