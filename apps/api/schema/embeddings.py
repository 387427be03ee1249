"""``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Literal

from apps.api.schema.base import Body, about


class EmbeddingBody(Body, kw_only=True):
    """``POST /v1/embeddings``."""

    model: Annotated[str, about("Alias of a served model.", min_length=1, max_length=256)]
    input: Annotated[str | list[str | int | list[int]], about("A text, texts, token ids, or lists of token ids.")]
    encoding_format: Annotated[Literal["float", "base64"], about("Default float.")] | None = None
    dimensions: Annotated[int, about("Not supported: vectors have the model's own size.", ge=1)] | None = None
    user: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
