"""``/v1/embeddings``."""

from __future__ import annotations

from apps.api import deps, plan
from apps.api.errors import invalid
from apps.api.http import ApiConsumer
from apps.api.schema.base import Decoder
from apps.api.schema.embeddings import EmbeddingBody

decode_embedding = Decoder(EmbeddingBody)


class EmbeddingsConsumer(ApiConsumer):
    """``POST /v1/embeddings``: refused by name for models that only generate."""

    async def post(self, body: bytes) -> None:
        self.need("generate")
        asked = decode_embedding(body)
        model = plan.resolve_model(asked.model, self.caller)
        served = deps.gateway().models().get(model)
        if served is None or served.kind != "embed":
            raise invalid(f"The model {model!r} does not make embeddings.", "model", "model_not_supported")
        raise invalid("Embeddings are not implemented by this server.", "model", "unsupported_endpoint")
