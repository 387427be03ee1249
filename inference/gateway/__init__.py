"""The server's side of a request: submit it, read its stream, and be certain that it ends."""

from inference.gateway.ended import Detached, RequestEnded
from inference.gateway.gateway import Gateway
from inference.gateway.group import StreamGroup
from inference.gateway.presence import is_coming
from inference.gateway.settler import Settler
from inference.gateway.stream import RequestStream
from inference.store.records import Submission as RequestSpec

__all__ = [
    "Detached",
    "Gateway",
    "RequestEnded",
    "RequestSpec",
    "RequestStream",
    "Settler",
    "StreamGroup",
    "is_coming",
]
