"""What other applications of this site use of the API without going over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from apps.accounts.principal import Principal
from apps.accounts.quota import Quota
from apps.api import plan
from apps.api.schema.base import explain
from apps.api.schema.generation import ChatBody
from inference.messages import Job

_SITE = Principal(
    owner="site",
    user_id=None,
    is_staff=False,
    scopes=frozenset({"generate", "read"}),
    allowed_models=None,
    label="this site",
    via="session",
)


async def chat_job(
    request_id: str,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any] | None = None,
    *,
    continue_final: bool = False,
    quotas: tuple[Quota, ...] = (),
) -> Job:
    """The job that answers a conversation, checked exactly as ``POST /v1/chat/completions`` does.

    Whether somebody may use the model is for whoever calls this to say.

    Args:
        params: further fields of that endpoint's body (``temperature``, ``max_tokens``, ...).
        continue_final: the answer goes on where the last message, an assistant's, ends.
        quotas: of whom it is for; an answer whose length is not asked for keeps within them.

    Raises:
        ApiError: the request is wrong, or can not be prepared now.
    """
    raw = {"model": model, "messages": list(messages), **(params or {})}
    try:
        body = msgspec.convert(raw, ChatBody)
    except msgspec.ValidationError as exc:
        raise explain(str(exc)) from None
    caller = replace(_SITE, quotas=quotas)
    made = await plan.chat(body, caller, endpoint="chat-ui", request_id=request_id, continue_final=continue_final)
    return made.jobs[0]
