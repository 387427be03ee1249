"""The event stream of the in-flight page."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
from channels.db import database_sync_to_async
from django.contrib.auth import get_user_model
from django.core.exceptions import SuspiciousOperation
from django.db import DatabaseError
from django.http import QueryDict

from apps.accounts.auth import authenticate
from apps.accounts.principal import Principal
from apps.inflight.feed import Feed
from apps.inflight.query import Query
from apps.inflight.roster import source
from inference.errors import SluiceError
from sluice import runtime
from sluice.consumers import HttpError, StreamingHttpConsumer

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between updates of one page, at least."""
ASK_AGAIN = 5.0
"""Seconds after which it is asked whether who looks may still do so."""
LIFETIME = 120.0
"""Seconds after which the browser connects anew."""


class InflightEvents(StreamingHttpConsumer):
    """``GET /inflight/live?<the page's filters>``: one diff a second, as server-sent events."""

    async def get(self, body: bytes) -> None:
        if not await may_view(self.principal):
            raise HttpError(403, "This needs the permission inflight.view_inflight.", code="permission_denied")
        try:
            query = Query.parse(QueryDict(self.scope["query_string"]))
        except SuspiciousOperation as exc:  # Django's limit on the number of fields
            raise HttpError(400, "The query has too many fields.", code="invalid_query") from exc
        try:
            feed = Feed(source(), query)
            message = await feed.update()
        except SluiceError as exc:
            raise HttpError(503, str(exc), code="unavailable", retry_after=2) from exc
        await self.start_sse()
        await self._event(message)
        asked = time.monotonic()
        ends = asked + LIFETIME
        while time.monotonic() < ends and not runtime.status.leaving:
            await asyncio.sleep(INTERVAL)
            if time.monotonic() - asked >= ASK_AGAIN:
                if not await self._still_may():
                    break  # the browser connects anew, and is told
                asked = time.monotonic()
            try:
                await self._event(await feed.update())
            except SluiceError as exc:
                # The page stays open and says so; the next round tries again.
                await self._event({"problem": str(exc)})
        await self._event({"bye": True})

    async def _still_may(self) -> bool:
        """Whether the key, or the session and its user's permission, are still good."""
        try:
            principal = await authenticate(self.scope)
            return principal is not None and principal.is_staff and await may_view(principal)
        except DatabaseError:
            return False

    async def _event(self, message: dict[str, Any]) -> None:
        await self.send_sse_bytes(b"data: " + msgspec.json.encode(message) + b"\n\n")


async def may_view(principal: Principal) -> bool:
    """A user needs the permission; a service key the admin scope, which the route has checked."""
    if principal.user_id is None:
        return principal.may("admin")
    return await database_sync_to_async(_user_may_view)(principal.user_id)


def _user_may_view(user_id: int) -> bool:
    user = get_user_model()._default_manager.filter(pk=user_id, is_active=True).first()
    return user is not None and user.has_perm("inflight.view_inflight")  # type: ignore[attr-defined]
