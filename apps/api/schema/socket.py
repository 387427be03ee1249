"""What a client says on the WebSocket."""

from __future__ import annotations

from typing import Annotated

from apps.api.schema.base import MAX_INT, Body, about
from apps.api.schema.generation import GenerateBody

Reference = Annotated[str, about("The client's own reference for it.", min_length=1, max_length=128)]


class SocketGenerate(GenerateBody, kw_only=True, tag_field="type", tag="generate"):
    """The WebSocket's ``generate``: the fields of ``POST /generate``, and the client's own reference."""

    id: Reference
    stream: Annotated[bool, about("true only: answers are always streamed here.")] | None = None


class SocketCancel(Body, kw_only=True, tag_field="type", tag="cancel"):
    """Ends a generation of this socket."""

    id: Reference


class SocketAttach(Body, kw_only=True, tag_field="type", tag="attach"):
    """Reads on in a resumable request, of this socket or of any other client of the same owner."""

    id: Reference
    request_id: Annotated[str, about("As accepted told it.", min_length=1, max_length=128)]
    after: Annotated[int, about("Number of the last delta seen.", ge=0, le=MAX_INT)] | None = None


class SocketPing(Body, kw_only=True, tag_field="type", tag="ping"):
    """Answered with pong."""

    id: Reference | None = None


SocketMessage = SocketGenerate | SocketCancel | SocketAttach | SocketPing
