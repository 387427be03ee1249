"""What is served, and what its tokenizers make of a text."""

from __future__ import annotations

import time
from typing import Any

from apps.accounts.auth import issue_ticket
from apps.accounts.tickets import TICKET_SECONDS
from apps.api import deps, jobs, plan, prompts, upstream
from apps.api import tools as toolkit
from apps.api.errors import invalid
from apps.api.http import ApiConsumer
from apps.api.schema.base import Decoder, expect_nothing
from apps.api.schema.generation import DetokenizeBody, TokenizeBody
from inference.config import ModelSpec
from inference.errors import TooLarge

decode_tokenize = Decoder(TokenizeBody)
decode_detokenize = Decoder(DetokenizeBody)

_STARTED = int(time.time())


def model_entry(spec: ModelSpec) -> dict[str, Any]:
    """One model as OpenAI lists it, and what a client may want to know besides."""
    served = deps.gateway().models().get(spec.alias)
    out: dict[str, Any] = {
        "id": spec.alias,
        "object": "model",
        "created": _STARTED,
        "owned_by": "sluice",
        "ready": served is not None,
        "kind": spec.kind,
    }
    if served is not None:
        out["context_length"] = min(served.context_length, served.capacity_tokens)
        if served.suggested:
            out["suggested"] = served.suggested
    return out


class ModelsConsumer(ApiConsumer):
    """``GET /v1/models``."""

    async def get(self, body: bytes) -> None:
        specs = [spec for spec in deps.config().model_specs() if self.caller.may_use(spec.alias)]
        await self.send_json(200, {"object": "list", "data": [model_entry(spec) for spec in specs]})


class ModelConsumer(ApiConsumer):
    """``GET /v1/models/{id}``."""

    async def get(self, body: bytes) -> None:
        await self.send_json(200, model_entry(plan.check_model(self.kwargs["model"], self.caller)))


class TokenizeConsumer(ApiConsumer):
    """``POST /tokenize``."""

    async def post(self, body: bytes) -> None:
        self.need("read")
        asked = decode_tokenize(body)
        model = plan.resolve_model(asked.model, self.caller)
        tokenizer = await deps.tokenizer(model)
        upstream.check_tokenizer(tokenizer)
        limit = jobs.context_limit(model, tokenizer)
        plan.check_one_of(asked.prompt, asked.messages)
        _check_fit(asked)
        if asked.prompt is not None:
            text, special = asked.prompt, asked.add_special_tokens is not False
            try:
                ids = await prompts.in_thread(
                    lambda: tokenizer.encode_bounded(text, 4 * limit, add_special_tokens=special, trusted=True)
                )
            except TooLarge as exc:
                raise invalid(str(exc), "prompt", "context_length_exceeded") from None
        else:
            messages = prompts.conversation(asked.messages or [])
            use = toolkit.resolve(asked.tools, None, None)
            kwargs = dict(asked.chat_template_kwargs or {})
            ids = await prompts.in_thread(lambda: prompts.chat_ids(tokenizer, messages, use, 4 * limit, kwargs))
        out: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": ids}
        if asked.return_token_strs:
            out["token_strs"] = [tokenizer.token_text(token_id) for token_id in ids]
        await self.send_json(200, out)


def _check_fit(asked: TokenizeBody) -> None:
    """Raise 400 for what has no effect on the kind of input that was given."""
    if asked.prompt is None:
        if asked.add_special_tokens is not None:
            raise invalid("The chat template sets the special tokens.", "add_special_tokens", "invalid_value")
        return
    for name in ("tools", "chat_template_kwargs"):
        if getattr(asked, name):
            raise invalid("A plain prompt uses no chat template.", name, "invalid_value")


class DetokenizeConsumer(ApiConsumer):
    """``POST /detokenize``."""

    async def post(self, body: bytes) -> None:
        self.need("read")
        asked = decode_detokenize(body)
        tokenizer = await deps.tokenizer(plan.resolve_model(asked.model, self.caller))
        upstream.check_tokenizer(tokenizer)
        size = tokenizer.vocab_size
        if any(token_id >= size for token_id in asked.tokens):
            raise invalid(f"A token id is outside of the vocabulary (0 to {size - 1}).", "tokens", "invalid_value")
        text = await prompts.in_thread(lambda: tokenizer.decode(asked.tokens, skip_special=False))
        await self.send_json(200, {"prompt": text})


class TicketConsumer(ApiConsumer):
    """``POST /v1/tickets``: a single-use ticket for a browser's WebSocket."""

    async def post(self, body: bytes) -> None:
        expect_nothing(body)
        ticket = await issue_ticket(self.caller)
        await self.send_json(200, {"ticket": ticket, "expires_in": TICKET_SECONDS})
