"""What every consumer builds on: disconnects seen at once, tasks owned, errors in one shape."""

from sluice.consumers.errors import HttpError, error_body
from sluice.consumers.http import StreamingHttpConsumer
from sluice.consumers.live import live_consumers
from sluice.consumers.websocket import Refuse, StreamingWebSocketConsumer

__all__ = [
    "HttpError",
    "Refuse",
    "StreamingHttpConsumer",
    "StreamingWebSocketConsumer",
    "error_body",
    "live_consumers",
]
