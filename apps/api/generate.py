"""The endpoints that generate: chat completions, completions and ``/generate``."""

from __future__ import annotations

from apps.api import plan
from apps.api.http import ApiConsumer
from apps.api.render.chat import ChatRenderer
from apps.api.render.completions import CompletionRenderer
from apps.api.render.generate import GenerateRenderer
from apps.api.schema.base import Decoder
from apps.api.schema.generation import ChatBody, CompletionBody, GenerateBody

decode_chat = Decoder(ChatBody)
decode_completion = Decoder(CompletionBody)
decode_generate = Decoder(GenerateBody)


class ChatConsumer(ApiConsumer):
    """``POST /v1/chat/completions``."""

    async def post(self, body: bytes) -> None:
        self.need("generate")
        await self.serve(await plan.chat(decode_chat(body), self.caller), ChatRenderer)


class CompletionConsumer(ApiConsumer):
    """``POST /v1/completions``."""

    async def post(self, body: bytes) -> None:
        self.need("generate")
        await self.serve(await plan.completion(decode_completion(body), self.caller), CompletionRenderer)


class GenerateConsumer(ApiConsumer):
    """``POST /generate``."""

    async def post(self, body: bytes) -> None:
        self.need("generate")
        await self.serve(await plan.generate(decode_generate(body), self.caller), GenerateRenderer)
